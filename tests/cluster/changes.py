"""What is done by kubectl to a mesh while streams are open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.mesh.service_discovery import WatchTimes
from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.suffering import Traffic, judge
from tests.chaos.harness.table import Row
from tests.cluster.deployed import EXPERTS, GATEWAYS, TIMEOUT_S, Deployed, timed
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import PODS, Json
from tests.support.processes import poll

OUTAGE_S = 60.0
_NUM_STREAMS = 4
_TOKENS = 50
"""Between two changes."""


@contextmanager
def under_load(mesh: Deployed, traffic: Traffic, times: dict[str, float]) -> Iterator[Load]:
    """Streams are open meanwhile; fails if a request failed or was answered differently."""
    with Load([mesh.port], traffic.workload, _NUM_STREAMS) as load:
        load.wait_tokens(_TOKENS)
        yield load
        streams = load.finish()
    wait_idle(mesh.api)
    times["longest gap between two tokens"] = longest_gap_s(streams)
    judge(streams, traffic.expected, Row("kubectl"))


def change_pods(mesh: Deployed, load: Load, times: dict[str, float], prefix: str = "") -> None:
    """Everything once: scale up and down, an outage and a kill, a deleted pod, a restart of all.

    Args:
        mesh: Two expert workers serve, before and after.
        load: Must go on.
        times: Is told how long each takes.
        prefix: Of what it is told.
    """
    for count in (4, 2):
        with timed(times, f"{prefix}scale to {count}"):
            mesh.cluster.kubectl("scale", EXPERTS, f"--replicas={count}")
            mesh.settle(load, count, _TOKENS)
    with timed(times, f"{prefix}kill -9 while the API is away"):
        _kill_in_outage(mesh, load)
    before = mesh.incarnations()
    with timed(times, f"{prefix}delete pod"):
        mesh.cluster.kubectl("delete", "pod", "expert-worker-0", timeout_s=TIMEOUT_S)
        mesh.settle(load, 2, _TOKENS)
    assert mesh.incarnations()["expert-worker-0"] != before["expert-worker-0"]
    before = mesh.incarnations()
    with timed(times, f"{prefix}rollout restart"):
        mesh.cluster.kubectl("rollout", "restart", EXPERTS)
        mesh.wait_rolled_out(EXPERTS)
        mesh.settle(load, 2, _TOKENS)
    assert not set(before.values()) & set(mesh.incarnations().values())


def _kill_in_outage(mesh: Deployed, load: Load) -> None:
    """The API server is away; meanwhile a container is killed, and the kubelet starts it again."""
    restarts = mesh.restarts("expert-worker-1")
    with mesh.cluster.under(FakeApiServer.outage):
        mesh.cluster.kill_container("expert-worker-1", "expert-worker")
        load.wait_tokens(4 * _TOKENS)
    mesh.wait_restarted("expert-worker-1", restarts)
    mesh.settle(load, 2, _TOKENS)


def drain_node(mesh: Deployed, load: Load) -> None:
    """Drains the node of an expert worker, where no gateway is, and takes it back."""
    gateways = {pod["spec"]["nodeName"] for pod in mesh.gateway_pods()}
    victim = next(pod for pod in mesh.expert_pods() if pod["spec"]["nodeName"] not in gateways)
    name, node = victim["metadata"]["name"], victim["spec"]["nodeName"]
    mesh.cluster.kubectl(
        "drain", node, "--delete-emptydir-data", f"--timeout={TIMEOUT_S:.0f}s", timeout_s=TIMEOUT_S
    )
    mesh.settle(load, 2, _TOKENS)
    moved = next(pod for pod in mesh.expert_pods() if pod["metadata"]["name"] == name)
    assert moved["spec"]["nodeName"] != node
    mesh.cluster.kubectl("uncordon", node)


def restart_gateway(mesh: Deployed, load: Load) -> None:
    """A new gateway serves before the old one ends; clients keep their connections."""
    (old,) = (pod["metadata"]["name"] for pod in mesh.gateway_pods())
    mesh.cluster.kubectl("rollout", "restart", GATEWAYS)
    mesh.wait_rolled_out(GATEWAYS)

    def is_gone(pods: list[Json]) -> bool:
        return old not in {pod["metadata"]["name"] for pod in pods}

    mesh.cluster.wait(PODS, is_gone, what=f"{old} has ended", timeout_s=TIMEOUT_S)
    mesh.settle(load, 2, _TOKENS)


def sit_out_outage(mesh: Deployed, load: Load, times: dict[str, float]) -> None:
    """The gateway cannot reach the API server; a pod goes away meanwhile, and another comes."""
    (gateway,) = (pod["metadata"]["name"] for pod in mesh.gateway_pods())
    before, errors = mesh.incarnations(), mesh.api.metrics()["moe_discovery_errors_total"]
    with mesh.cluster.cut_off("gateway"):
        began_s = time.monotonic()
        force = ("--grace-period=0", "--force")
        mesh.cluster.kubectl("delete", "pod", "expert-worker-0", *force, timeout_s=TIMEOUT_S)
        mesh.wait_ready(2)
        assert mesh.incarnations()["expert-worker-0"] != before["expert-worker-0"]
        while time.monotonic() - began_s < OUTAGE_S:
            load.wait_tokens(_TOKENS)
        metrics = mesh.api.metrics()
        assert not mesh.knows_pods()
        assert metrics["moe_discovery_endpoints"] == 2, "the last view"
        assert metrics["moe_discovery_age_seconds"] >= OUTAGE_S - 1
        assert metrics["moe_discovery_errors_total"] > errors
        assert "no answer of the API server" in mesh.cluster.log(gateway, "gateway")
    limit_s = WatchTimes().longest_pause_s + WatchTimes().list_s
    what = f"pods are known after {OUTAGE_S:.0f} s without the API"
    times[what] = poll(mesh.knows_pods, timeout_s=limit_s, what=what)
    with timed(times, "and there are two copies of all experts"):
        mesh.settle(load, 2, _TOKENS)
