"""The thread that scales, its metrics, and its end."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, generate_latest

from bench.scaling_day.cluster import NAME, Cluster
from gateway.scaling.autoscaler import Autoscaler
from gateway.scaling.policy import ScalingPolicy
from gateway.scaling.scaler import NoScaler, ThreadScaler
from tests.support.processes import poll

TURN_S = 0.01
WAIT_S = 30.0


class ClosedCluster(Cluster):
    """Remembers that it was closed."""

    is_closed = False

    async def close(self) -> None:
        """As a ScaleTarget."""
        self.is_closed = True


def metrics(registry: CollectorRegistry) -> dict[str, float]:
    """Names with labels to values."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def test_turns_until_it_is_stopped() -> None:
    """What was decided and what failed is counted; no thread is left."""
    cluster = ClosedCluster(1)
    policy = ScalingPolicy(min_workers=4)
    autoscaler = Autoscaler(NAME, cluster, cluster.known_workers, cluster, policy)
    scaler, registry = ThreadScaler(autoscaler, cluster, TURN_S), CollectorRegistry()
    scaler.register(registry)
    assert "moe_scaling_desired" not in metrics(registry)
    scaler.start()
    try:
        poll(lambda: cluster.replicas == 4, timeout_s=WAIT_S, what="it asks for 4")
        desired = "moe_scaling_desired"
        poll(lambda: metrics(registry).get(desired) == 4, timeout_s=WAIT_S, what="it says so")
        cluster.is_cut_off = True
        error = 'moe_scaling_errors_total{cause="unreachable"}'
        poll(lambda: metrics(registry).get(error, 0) > 1, timeout_s=WAIT_S, what="again")
    finally:
        scaler.stop()
    found = metrics(registry)
    assert found['moe_scaling_decisions_total{direction="up",reason="minimum"}'] == 1
    assert cluster.is_closed
    assert "scaling" not in [thread.name for thread in threading.enumerate()]


def test_one_that_never_began_can_be_stopped() -> None:
    """And one that does nothing has no metrics."""
    cluster = Cluster(1)
    autoscaler = Autoscaler(NAME, cluster, cluster.known_workers, cluster, ScalingPolicy())
    ThreadScaler(autoscaler, cluster).stop()
    nothing, registry = NoScaler(), CollectorRegistry()
    nothing.register(registry)
    nothing.start()
    nothing.stop()
    assert metrics(registry) == {}
