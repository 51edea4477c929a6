"""Rules and dashboard ask for what processes expose, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.kube.resources import Json
from tests.support.manifests import Manifests
from tests.support.metric_families import (
    MetricFamily,
    expert_worker_families,
    gateway_families,
)
from tests.support.processes import ROOT
from tests.support.promql import Series, query_faults, result_labels

HERE = Path(__file__).parent
ALERT_TESTS = HERE / "alert_tests.yaml"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
MONITORED, KEDA = "local-cpu+monitoring", "local-cpu+keda-gateway"


@dataclass(frozen=True)
class Query:
    """A query of a manifest."""

    where: str
    text: str
    shown: tuple[str, ...]
    """Labels that are shown of what it finds."""


@pytest.fixture(scope="module")
def series() -> Series:
    """Exposed names and their labels."""
    families = (*gateway_families(), *expert_worker_families())
    return {name: labels for family in families for name, labels in _exposed(family)}


def _exposed(family: MetricFamily) -> Iterator[tuple[str, frozenset[str]]]:
    labels = frozenset(family.labels)
    if family.kind not in ("histogram", "summary"):
        yield family.exposed_name, labels
        return
    yield f"{family.name}_sum", labels
    yield f"{family.name}_count", labels
    if family.kind == "histogram":
        yield f"{family.name}_bucket", labels | {"le"}


@pytest.fixture(scope="module")
def queries(rendered: dict[str, Manifests]) -> list[Query]:
    """All there are."""
    found = [
        *(_rule_query(rule) for rule in rules(rendered)),
        *_panel_queries(rendered[MONITORED]),
        *_trigger_queries(rendered[KEDA]),
    ]
    assert len(found) > 50
    return found


def rules(rendered: dict[str, Manifests]) -> list[Json]:
    """Of all groups."""
    spec = rendered[MONITORED].one("PrometheusRule", "expertmesh")["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def _rule_query(rule: Json) -> Query:
    texts = json.dumps(rule["annotations"])
    shown = tuple(re.findall(r"\$labels\.(\w+)", texts))
    return Query(rule["alert"], rule["expr"], shown)


def _panel_queries(found: Manifests) -> Iterator[Query]:
    (text,) = found.one("ConfigMap", "expertmesh-dashboard")["data"].values()
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            shown = tuple(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Query(panel["title"], target["expr"], shown)


def _trigger_queries(found: Manifests) -> Iterator[Query]:
    for scaled in found.of("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            yield Query(scaled["metadata"]["name"], trigger["metadata"]["query"], ())


def test_queries_ask_for_what_there_is(queries: list[Query], series: Series) -> None:
    """Metrics, labels, and rates of counters only."""
    faults = [(each.where, fault) for each in queries for fault in query_faults(each.text, series)]
    assert faults == []


def test_shown_labels_are_there(queries: list[Query], series: Series) -> None:
    """Annotations and legends name labels that results have."""
    for each in queries:
        assert set(each.shown) <= result_labels(each.text, series), each.where


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("moe_unheard_of > 0", "no metric moe_unheard_of"),
        ("sum(moe_generation_tokens)", "no metric moe_generation_tokens"),
        ('moe_workers{status="lost"}', "moe_workers has no label status"),
        ("sum by (worker) (moe_workers)", "grouped by worker, which is no label there"),
        ("rate(moe_ready[1m])", "rate of moe_ready, which does not count"),
        ("sum by (le) (rate(moe_dispatch_duration_seconds_sum[1m]))", "grouped by le, which"),
    ],
)
def test_each_fault_is_found(query: str, fault: str, series: Series) -> None:
    """Each check can fail."""
    (found,) = query_faults(query, series)
    assert found.startswith(fault)


def test_what_is_no_query_is_refused(series: Series) -> None:
    """A dashboard would show nothing."""
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        list(query_faults("sum by (", series))


def test_labels_of_results(series: Series) -> None:
    """Those grouped by; all of a choice; none of what is absent."""
    assert result_labels("sum by (state) (moe_workers) > 0", series) == {"state"}
    assert {"state", "pod"} <= result_labels("topk(3, moe_workers)", series)
    assert result_labels("absent(moe_ready)", series) == frozenset()


def test_panels_do_not_overlap(rendered: dict[str, Manifests]) -> None:
    """Each has an id and a place of its own."""
    (text,) = rendered[MONITORED].one("ConfigMap", "expertmesh-dashboard")["data"].values()
    panels = json.loads(text)["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_is_explained(rendered: dict[str, Manifests]) -> None:
    """In docs/troubleshooting.md, and by a test of when it fires and when it does not."""
    alerts = {rule["alert"] for rule in rules(rendered)}
    assert alerts == set(re.findall(r"`(ExpertMesh\w+)`", TROUBLESHOOTING.read_text()))
    checks = [
        check
        for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]
        for check in test["alert_rule_test"]
    ]
    for is_firing in (True, False):
        tested = {each["alertname"] for each in checks if bool(each["exp_alerts"]) == is_firing}
        assert tested == alerts


def test_alerts_fire(rendered: dict[str, Manifests], tmp_path: Path) -> None:
    """And only then; promtool of Debian's package `prometheus` computes it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: alerts are not evaluated")
    spec = rendered[MONITORED].one("PrometheusRule", "expertmesh")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    shutil.copy(ALERT_TESTS, tmp_path)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", ALERT_TESTS.name]):
        result = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr
