"""What docs/kubernetes.md says of sizes, names and files is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from expertmesh.model_tools.inspect import inspect_model
from tests.support.manifests import DEPLOY, Manifests, kustomize, parse
from tests.support.metric_names import known_metrics, metrics_in
from tests.support.processes import ROOT
from tests.support.published_models import CONFIGS

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
SEQUENCES, CONTEXT = 64, 4096
GIB = 2**30

_ROW = re.compile(r"\| (\S+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| (\d+) \|")
ROWS = _ROW.findall(GUIDE)


def test_there_is_a_table_of_sizes() -> None:
    """The rows below are not none."""
    assert len(ROWS) >= 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_sizes_are_those_of_model_inspect(row: tuple[str, ...], tmp_path: Path) -> None:
    """Weights, keys and values, experts: to a tenth of a GiB."""
    name, *told, workers = row
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS[name])))
    facts = inspect_model(tmp_path, CONTEXT).json()
    memory, kv_cache = facts["memory"], facts["kv_cache"]
    assert isinstance(memory, dict)
    assert isinstance(kv_cache, dict)
    experts = next(each for each in memory["expert_workers"] if each["workers"] == 1)["max_bytes"]
    wanted = (
        memory["attention_worker_bytes"],
        kv_cache["bytes_of_context"] * SEQUENCES,
        experts,
        2 * experts / int(workers),
    )
    for figure, nbytes in zip(told, wanted, strict=True):
        assert float(figure) == pytest.approx(nbytes / GIB, abs=0.06)


def test_names_exist() -> None:
    """Metrics are there, and files that are linked or applied."""
    assert metrics_in(GUIDE) - known_metrics() == set()
    assert len(metrics_in(GUIDE)) >= 6
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"\bdeploy/[a-z/.-]+[a-z]", GUIDE):
        assert (ROOT / path).exists(), path
    for component in (DEPLOY / "components").iterdir():
        assert f"components/{component.name}/README.md" in GUIDE


def test_a_second_namespace_is_all_its_own(tmp_path: Path) -> None:
    """What the guide says of an upgrade: one line moves an overlay to another namespace whole."""
    near = tmp_path.resolve().relative_to("/")
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "expertmesh-green",
        "resources": ["../" * len(near.parts) + str(DEPLOY / "overlays/gpu-prod").lstrip("/")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    green = Manifests("green", parse(kustomize(tmp_path)))
    assert green.find("Namespace", "expertmesh-green")
    for each in green.objects:
        if each["kind"] not in ("Namespace", "PriorityClass"):
            assert each["metadata"]["namespace"] == "expertmesh-green"
    (binding,) = green.of("RoleBinding")
    assert binding["subjects"][0]["namespace"] == "expertmesh-green"
