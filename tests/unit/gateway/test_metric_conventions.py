"""Our metrics follow Prometheus' conventions; promtool says so too, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.exposition import ExpertExposition
from gateway.vllm_names import VLLM_NAMES
from tests.support.metric_names import gateway_registry
from tests.support.seen_mesh import SeenMesh

TYPES = ("gauge", "counter", "histogram", "summary")
OTHER_UNITS = (
    *("milliseconds", "microseconds", "minutes", "hours", "days", "percent"),
    *("kilobytes", "megabytes", "gigabytes", "bits", "celsius"),
)
ABBREVIATED = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "m", "h", "d")


def _faults(name: str, kind: str, text: str) -> Iterator[str]:
    """What promtool would find fault with.

    Args:
        name: As it is exposed: that of a counter with its suffix.
        kind: Its type.
        text: Its help.
    """
    parts = name.split("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield "not in snake case, or with a colon"
    if not text:
        yield "no help"
    if (kind == "counter") != name.endswith("_total"):
        yield "counters end in _total, and nothing else"
    if name.endswith(("_count", "_sum", "_bucket", "_created")):
        yield "a suffix of histograms"
    yield from (f"names its type, {kind}" for kind in TYPES if kind in parts)
    yield from (f"unit {unit}" for unit in OTHER_UNITS if unit in parts)
    yield from (f"abbreviated unit {unit}" for unit in ABBREVIATED if unit in parts)


def _exposition(registry: CollectorRegistry) -> str:
    """Ours: what is repeated under vLLM's names has its faults, too."""
    families = [family for family in registry.collect() if ":" not in family.name]

    class Ours:
        def collect(self) -> Iterator[object]:
            yield from families

    return generate_latest(Ours()).decode()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """/metrics and /metrics/experts."""
    experts = b"".join(ExpertExposition(SeenMesh().sources()).pieces()).decode()
    return [_exposition(gateway_registry()), experts]


def test_names(texts: list[str]) -> None:
    """Ours begin with moe_, have a help, and say what they count in base units."""
    for text in texts:
        families = list(text_string_to_metric_families(text))
        assert families
        for family in families:
            suffix = "_total" if family.type == "counter" else ""
            faults = list(_faults(family.name + suffix, family.type, family.documentation))
            assert faults == [], family.name
            assert family.name.startswith("moe_")


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        *(("moe_x", "counter", "t"), ("moe_x_total", "gauge", "t"), ("moe_x", "gauge", "")),
        *(("moe_x_count", "gauge", "t"), ("vllm:x", "gauge", "t"), ("moe_gauge_x", "gauge", "t")),
        *(("moe_x_milliseconds", "gauge", "t"), ("moe_x_ms", "gauge", "t")),
    ],
)
def test_each_fault_is_found(name: str, kind: str, text: str) -> None:
    """The rules find what they look for."""
    assert list(_faults(name, kind, text))


def test_promtool_agrees(texts: list[str]) -> None:
    """Debian's package `prometheus` has it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for text in texts:
        result = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_every_name_of_vllm_has_a_source() -> None:
    """And is exposed once, with the label that vLLM gives its engines."""
    names = [family.name for family in gateway_registry().collect()]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("vllm:")} == set(VLLM_NAMES.values())
    for family in gateway_registry().collect():
        if family.name.startswith("vllm:"):
            assert all(sample.labels["engine"] == "0" for sample in family.samples)
