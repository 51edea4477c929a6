"""What the real kubectl needs of an API server, of ours as of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.servers import Server
from tests.support.kube.kubectl import Kubectl

Run = Callable[..., Awaitable[str]]

_CONTAINER = {"name": "main", "image": "none", "env": [{"name": "A", "value": "1"}]}


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    """Runs kubectl while the server goes on."""
    config = tmp_path / "kubeconfig"
    config.write_text(server.kubeconfig)
    kubectl = Kubectl(config, tmp_path)
    return lambda *arguments: asyncio.to_thread(kubectl, *arguments)


def _manifest(folder: Path, **changes: object) -> str:
    """Writes a StatefulSet without pods; `changes` are of its container."""
    labels = {"app": "pods"}
    spec = {
        "serviceName": "pods",
        "replicas": 0,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"containers": [{**_CONTAINER, **changes}]},
        },
    }
    item = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "pods"}}
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump({**item, "spec": spec}))
    return str(path)


async def test_apply(run: Run, tmp_path: Path) -> None:
    """Makes, leaves alone, and changes; lists are merged by name."""
    expected = "statefulset.apps/pods"
    assert await run("apply", "-f", _manifest(tmp_path)) == f"{expected} created\n"
    assert await run("apply", "-f", _manifest(tmp_path)) == f"{expected} unchanged\n"
    await run("set", "env", "statefulset/pods", "B=2")
    changed = _manifest(tmp_path, env=[{"name": "A", "value": "3"}])
    assert await run("apply", "-f", changed) == f"{expected} configured\n"
    path = "{range .spec.template.spec.containers[0].env[*]}{.name}={.value} {end}"
    seen = await run("get", "statefulset", "pods", "-o", f"jsonpath={path}")
    assert sorted(seen.split()) == ["A=3", "B=2"]


async def test_scale(run: Run, tmp_path: Path) -> None:
    """Writes replicas, if they are what the caller thinks."""
    await run("apply", "-f", _manifest(tmp_path))
    await run("scale", "statefulset/pods", "--replicas=0", "--current-replicas=0")
    with pytest.raises(AssertionError, match="Expected replicas to be 5, was 0"):
        await run("scale", "statefulset/pods", "--replicas=1", "--current-replicas=5")


async def test_rollout(run: Run, tmp_path: Path) -> None:
    """A restart changes the template; the status waits until the controller has seen it."""
    await run("apply", "-f", _manifest(tmp_path))
    await run("rollout", "restart", "statefulset/pods")
    seen = await run("rollout", "status", "statefulset/pods", "--timeout=30s")
    assert "0 new pods have been updated" in seen or "complete" in seen, seen


async def test_delete(run: Run, tmp_path: Path) -> None:
    """Returns once the object is gone."""
    manifest = _manifest(tmp_path)
    await run("apply", "-f", manifest)
    await run("delete", "-f", manifest, "--timeout=30s")
    assert await run("get", "statefulsets", "-o", "name") == ""
