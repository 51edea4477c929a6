"""kubectl apply, scale, delete, rollout restart, a kill, an outage of the API: no request notices.

The manifests of `deploy/` run as processes of this machine, the API server is that of the tests,
kubectl is the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.suffering import Traffic, judge
from tests.chaos.harness.table import Row
from tests.cluster.deployed import EXPERTS, TIMEOUT_S, Deployed, deployed, timed
from tests.support.kube.api_server import FakeApiServer

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

NUM_STREAMS = 4
TOKENS = 50
"""Between two changes."""

Times = dict[str, float]


@pytest.fixture(scope="module")
def mesh(cluster_model: Path, times: Times) -> Iterator[Deployed]:
    """A gateway and two expert workers."""
    with timed(times, "all, until the cluster is gone"), deployed(cluster_model, times) as running:
        yield running


def test_changes_under_load(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """0 failed requests, 0 changed answers, whatever is done to the expert workers."""
    with Load([mesh.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(TOKENS)
        _scale(mesh, load, times)
        _outage(mesh, load, times)
        _replace(mesh, load, times)
        streams = load.finish()
    wait_idle(mesh.api)
    times["longest gap between two tokens"] = longest_gap_s(streams)
    judge(streams, traffic.expected, Row("kubectl"))


def _scale(mesh: Deployed, load: Load, times: Times) -> None:
    """To four, which get experts; back to two, of which the leaving ones hand over first."""
    for count in (4, 2):
        with timed(times, f"scale to {count}"):
            mesh.cluster.kubectl("scale", EXPERTS, f"--replicas={count}")
            mesh.settle(load, count, TOKENS)


def _outage(mesh: Deployed, load: Load, times: Times) -> None:
    """The API server is away; meanwhile a container is killed, and the kubelet starts it again."""
    with timed(times, "kill -9 while the API is away"):
        with mesh.cluster.under(FakeApiServer.outage):
            mesh.cluster.kill_container("expert-worker-1", "expert-worker")
            load.wait_tokens(4 * TOKENS)
        mesh.wait_restarted("expert-worker-1")
        mesh.settle(load, 2, TOKENS)


def _replace(mesh: Deployed, load: Load, times: Times) -> None:
    """A pod is deleted, then all are replaced one after the other."""
    before = mesh.incarnations()
    with timed(times, "delete pod"):
        mesh.cluster.kubectl("delete", "pod", "expert-worker-0", timeout_s=TIMEOUT_S)
        mesh.settle(load, 2, TOKENS)
    assert mesh.incarnations()["expert-worker-0"] != before["expert-worker-0"]
    before = mesh.incarnations()
    with timed(times, "rollout restart"):
        mesh.cluster.kubectl("rollout", "restart", EXPERTS)
        status = ("rollout", "status", EXPERTS, f"--timeout={TIMEOUT_S:.0f}s")
        mesh.cluster.kubectl(*status, timeout_s=TIMEOUT_S)
        mesh.settle(load, 2, TOKENS)
    assert not set(before.values()) & set(mesh.incarnations().values())
