"""An overlay on `deploy/overlays/local-cpu` for a pocket cluster: a tiny model, short periods.

What is changed is what a pod on this machine cannot have or a test cannot wait for. Commands,
arguments, hooks, probes and everything else are those of the base.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from tests.support.kernels import kernel_cache
from tests.support.manifests import DEPLOY

NAMESPACE = "expertmesh"
_SETTINGS = {
    "EXPERTMESH_MODEL": "/models/tiny",
    "EXPERTMESH_DTYPE": "float32",
    # A pod's own token has a fixed path, which pods on this machine cannot have.
    "EXPERTMESH_KUBECONFIG": "/models/kubeconfig",
    # However long a busy machine takes to start an expert worker.
    "EXPERTMESH_EXPERTS_HOLD_S": "120",
}
_PERIODS = {"periodSeconds": 1, "failureThreshold": 600}


def write_overlay(folder: Path, model: Path, kubeconfig: Path) -> Path:
    """Writes the overlay into a new folder below `folder` and returns that.

    Args:
        folder: Of the cluster.
        model: A checkpoint.
        kubeconfig: Leads gateways to the API server, with the rights of their service account.
    """
    models, cache = folder / "models", folder / "cache"
    models.mkdir()
    cache.mkdir()
    (models / "tiny").symlink_to(model)
    (models / "kubeconfig").symlink_to(kubeconfig)
    (cache / "numba").symlink_to(kernel_cache())
    overlay = folder / "overlay"
    overlay.mkdir()
    kustomization = _kustomization(os.path.relpath(DEPLOY / "overlays" / "local-cpu", overlay))
    kustomization["patches"] = [
        {"patch": yaml.safe_dump(patch)}
        for patch in (
            _workload("Deployment", "gateway", models, cache),
            _workload("StatefulSet", "expert-worker", models, cache),
        )
    ]
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return overlay


def _kustomization(base: str) -> dict[str, object]:
    settings = [f"{name}={value}" for name, value in _SETTINGS.items()]
    merged = {"name": "expertmesh", "namespace": NAMESPACE, "behavior": "merge"}
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
        "configMapGenerator": [{**merged, "literals": settings}],
    }


def _workload(kind: str, name: str, models: Path, cache: Path) -> dict[str, object]:
    container = {
        "name": name,
        "resources": {"limits": {"cpu": "1"}},  # one thread each: all pods share two cores
        "startupProbe": _PERIODS,
        "readinessProbe": {"periodSeconds": 1},
    }
    volumes = [
        {"name": volume, "emptyDir": None, "hostPath": {"path": str(path)}}
        for volume, path in (("models", models), ("cache", cache))
    ]
    pod = {
        "containers": [container],
        "volumes": volumes,
    }
    spec: dict[str, object] = {"template": {"spec": pod}}
    if kind == "StatefulSet":
        spec["minReadySeconds"] = 1
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
