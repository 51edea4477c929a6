"""The cluster of the tests: what kubectl applies is run as manifests say, and ends as they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kube.controllers.pods import is_ready
from tests.support.kube.pocket_cluster import PocketCluster, pocket_cluster
from tests.support.kube.resources import ENDPOINT_SLICES, PODS, STATEFUL_SETS, Json
from tests.support.processes import poll

MANIFESTS = Path(__file__).parent / "manifests" / "echo.yaml"
READY_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[PocketCluster]:
    """Two pods of a small HTTP server, behind a Service."""
    with pocket_cluster("default") as running:
        running.kubectl("apply", "-f", str(MANIFESTS))
        yield running


def _wait_ready(cluster: PocketCluster, count: int) -> None:
    def are_ready(pods: list[Json]) -> bool:
        return len(pods) == count and all(map(is_ready, pods))

    cluster.wait(PODS, are_ready, what=f"{count} pods are ready", timeout_s=READY_S)


def _seen(cluster: PocketCluster, name: str) -> Json:
    """What a pod says that it got."""
    return json.loads(cluster.log(name, "echo").splitlines()[0])


def _let_go(cluster: PocketCluster) -> bool:
    """Has preStop end wherever it runs; whether it does anywhere."""
    waiting = list((cluster.folder / "pods").glob("echo-*/shared/pre-stop"))
    for path in waiting:
        path.with_name("go").touch()
    return bool(waiting)


def test_containers_get_what_manifests_say(cluster: PocketCluster) -> None:
    """Fields of the pod, limits, ConfigMap and Secret as variables and files, its own address."""
    _wait_ready(cluster, 2)
    first, second = (_seen(cluster, f"echo-{number}") for number in range(2))
    assert first["address"] != second["address"]
    assert first["argv"] == [f"--host={first['address']}", "--greeting=hello", "--literal=$(NONE)"]
    assert first["env"] == {
        "POD_NAME": "echo-0",
        "CORES": "2",
        "GREETING": "hello",
        "PASSWORD": "secret",
        "BOTH": "hello echo-0",
    }
    assert first["files"] == {"greeting": "hello", "made-by-init": "echo-0"}


def test_services_have_their_ready_pods(cluster: PocketCluster) -> None:
    """With their names, uids and ports."""
    _wait_ready(cluster, 2)
    (found,) = cluster.list(ENDPOINT_SLICES)
    assert found["ports"] == [{"name": "http", "port": 8080, "protocol": "TCP"}]
    pods = {pod["metadata"]["uid"]: pod["status"]["podIP"] for pod in cluster.list(PODS)}
    for endpoint in found["endpoints"]:
        assert pods[endpoint["targetRef"]["uid"]] == endpoint["addresses"][0]
        assert endpoint["conditions"] == {"ready": True, "serving": True, "terminating": False}


def test_killed_containers_are_started_again(cluster: PocketCluster) -> None:
    """In the same pod."""
    _wait_ready(cluster, 2)
    before = {pod["metadata"]["uid"] for pod in cluster.list(PODS)}
    cluster.kill_container("echo-1", "echo")

    def is_restarted(pods: list[Json]) -> bool:
        counts = [
            each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]
        ]
        return sum(counts) == 1 and all(map(is_ready, pods))

    cluster.wait(PODS, is_restarted, what="it is ready again", timeout_s=READY_S)
    assert {pod["metadata"]["uid"] for pod in cluster.list(PODS)} == before


def test_scaling_down_runs_pre_stop_first(cluster: PocketCluster) -> None:
    """The highest pod serves on while preStop runs, is not ready for others, and then is gone."""
    _wait_ready(cluster, 2)
    cluster.kubectl("scale", "statefulset/echo", "--replicas=1")
    leaving = {"ready": False, "serving": True, "terminating": True}

    def shows_it(slices: list[Json]) -> bool:
        return any(
            endpoint["conditions"] == leaving
            for item in slices
            for endpoint in item["endpoints"] or []
        )

    cluster.wait(ENDPOINT_SLICES, shows_it, what="it is leaving", timeout_s=READY_S)
    poll(lambda: _let_go(cluster), timeout_s=READY_S, what="preStop runs")
    _wait_ready(cluster, 1)
    assert cluster.list(PODS)[0]["metadata"]["name"] == "echo-0"
    cluster.kubectl("scale", "statefulset/echo", "--replicas=2")
    _wait_ready(cluster, 2)


def test_rollout_restart_replaces_all(cluster: PocketCluster) -> None:
    """One pod after the other, from the highest number down; kubectl waits for the end."""
    _wait_ready(cluster, 2)
    before = {pod["metadata"]["uid"] for pod in cluster.list(PODS)}
    cluster.kubectl("rollout", "restart", "statefulset/echo")

    def are_new() -> bool:
        _let_go(cluster)
        (item,) = cluster.list(STATEFUL_SETS)
        status = item["status"]
        return (
            status["currentRevision"] == status["updateRevision"] and status["readyReplicas"] == 2
        )

    poll(are_new, timeout_s=READY_S, what="all pods are new")
    cluster.kubectl("rollout", "status", "statefulset/echo", "--timeout=30s")
    assert not before & {pod["metadata"]["uid"] for pod in cluster.list(PODS)}
