"""Overlays and components render, the same every time, and are what Kubernetes takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.kube.resources import Json
from tests.support.manifests import (
    ADDED_COMPONENTS,
    COMPONENTS,
    DEPLOY,
    OVERLAYS,
    VARIANTS,
    Breakage,
    Manifests,
    labels_of,
    render_all,
)

MINORS = ("1.30", "1.34", "1.37")
"""Kubernetes versions: the oldest that has all fields, one in between, the newest."""

SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parent / "schemas").glob("*.json")
}
"""Of kinds that are not Kubernetes' own, as far as we use them."""

LABEL = "app.kubernetes.io"


def test_every_overlay_and_component_is_rendered() -> None:
    """None is forgotten here, and each component says what it is for."""
    assert {folder.name for folder in (DEPLOY / "overlays").iterdir()} == set(OVERLAYS)
    local = yaml.safe_load((DEPLOY / "overlays/local-cpu/kustomization.yaml").read_text())
    inside = {Path(path).name for path in local["components"]}
    assert inside | set(ADDED_COMPONENTS) == set(COMPONENTS)
    for name in COMPONENTS:
        assert (DEPLOY / "components" / name / "README.md").read_text().startswith("# ")


def test_rendering_is_deterministic(texts: dict[str, bytes], tmp_path: Path) -> None:
    """Twice gives the same bytes, so that a diff shows changes and nothing else."""
    assert dict(render_all(tmp_path, VARIANTS)) == texts


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads megabytes of JSON anew for each object."""
    read_once = functools.cache(kubernetes_validate.utils.schema_contents)
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", read_once):
        yield


def refused(objects: list[Json], minor: str) -> list[str]:
    """What a strict API server of this version would say."""
    problems = []
    for each in objects:
        kind, name = each["kind"], each["metadata"]["name"]
        try:
            if kind in SCHEMAS:
                jsonschema.validate(each, SCHEMAS[kind])
            else:
                kubernetes_validate.validate(each, minor, strict=True)
        except (
            jsonschema.ValidationError,
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
        ) as error:
            problems.append(f"{kind} {name}: {error.message}")
    return problems


@pytest.fixture(scope="session")
def distinct(rendered: dict[str, Manifests]) -> list[Json]:
    """The objects of all variants, equal ones once."""
    every = [each for found in rendered.values() for each in found.objects]
    return list({json.dumps(each, sort_keys=True): each for each in every}.values())


@pytest.mark.parametrize("minor", MINORS)
def test_schemas(distinct: list[Json], minor: str) -> None:
    """Every field is known to this Kubernetes and of the right type, and none is missing."""
    assert refused(distinct, minor) == []


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        ("Deployment", "gateway", {"spec": {"template": {}}}),
        ("StatefulSet", "expert-worker", {"spec": {"replicas": 2, "nonsense": 1}}),
        ("Service", "gateway", {"spec": {"ports": [{"port": "http"}]}}),
        ("PodDisruptionBudget", "gateway", {"apiVersion": "policy/v1beta1"}),
        ("ServiceMonitor", "gateway", {"spec": {"endpoints": []}}),
        ("PrometheusRule", "expertmesh", {"spec": {"groups": [{"name": "empty"}]}}),
        ("Certificate", "mesh-ca", {"spec": {"secretName": "mesh-ca"}}),
        ("Issuer", "mesh-ca", {"spec": {"ca": {}}}),
    ],
)
def test_schemas_refuse(
    rendered: dict[str, Manifests], minor: str, kind: str, name: str, wrong: Json
) -> None:
    """The schemas are not so wide that they would take anything."""
    found = rendered["gpu-prod"].one(kind, name)
    assert refused([found], minor) == []
    assert len(refused([found | wrong], minor)) == 1


def test_a_scaled_object_without_target_is_refused(rendered: dict[str, Manifests]) -> None:
    """KEDA's schema is not too wide, either."""
    found = rendered["local-cpu+keda-gateway"].one("ScaledObject", "gateway")
    assert refused([found], MINORS[0]) == []
    assert len(refused([found | {"spec": {"triggers": found["spec"]["triggers"]}}], MINORS[0])) == 1


def test_names_are_unique(found: Manifests) -> None:
    """No object hides another."""
    ids = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in found.objects
    ]
    assert len(ids) == len(set(ids))


def test_everything_is_in_one_namespace(found: Manifests) -> None:
    """But for what belongs to the cluster."""
    for each in found.objects:
        wanted = None if each["kind"] in ("Namespace", "PriorityClass") else "expertmesh"
        assert each["metadata"].get("namespace") == wanted, each["metadata"]["name"]
    for binding in found.of("RoleBinding"):
        assert all(subject["namespace"] == "expertmesh" for subject in binding["subjects"])


def test_labels_are_those_that_kubernetes_recommends(found: Manifests) -> None:
    """Every object and pod says what it is and what it belongs to; discovery keeps models apart."""
    for each in found.objects:
        labels = each["metadata"].get("labels", {})
        assert labels.get(f"{LABEL}/part-of") == "expertmesh", each["metadata"]["name"]
        assert each["kind"] == "ConfigMap" or f"{LABEL}/name" in labels, each["metadata"]["name"]
    for workload in found.workloads:
        labels = labels_of(workload)
        assert {f"{LABEL}/name", f"{LABEL}/component", f"{LABEL}/part-of"} <= labels.keys()
        assert labels[f"{LABEL}/name"] == workload["metadata"]["name"]
    selector = found.one("Service", "expert-worker")["spec"]["selector"]
    assert "expertmesh.io/model-revision" in selector


BREAKAGES = [
    Breakage(
        test_names_are_unique, "an object twice", lambda m: m.objects.append(m.objects[0])
    ),
    Breakage(
        test_everything_is_in_one_namespace,
        "a Service in the namespace of whoever applies it",
        lambda m: m.one("Service", "gateway")["metadata"].pop("namespace"),
    ),
    Breakage(
        test_labels_are_those_that_kubernetes_recommends,
        "a Service without labels",
        lambda m: m.one("Service", "gateway")["metadata"].pop("labels"),
    ),
    Breakage(
        test_labels_are_those_that_kubernetes_recommends,
        "pods without a name",
        lambda m: labels_of(m.gateway).pop(f"{LABEL}/name"),
    ),
    Breakage(
        test_labels_are_those_that_kubernetes_recommends,
        "discovery of any model",
        lambda m: m.one("Service", "expert-worker")["spec"]["selector"].pop(
            "expertmesh.io/model-revision"
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=str)
def test_breakage_is_noticed(breakage: Breakage, rendered: dict[str, Manifests]) -> None:
    """Each check can fail."""
    breakage.assert_noticed(rendered)
