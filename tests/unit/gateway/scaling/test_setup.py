"""What the settings make: from an expert worker's snapshot to the number that is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh.errors import SettingsError
from expertmesh.scaling_settings import ScalingSettings
from expertmesh.settings import MeshOptions
from expertmesh.transport import Plaintext
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.mesh.worker_report import KnownWorker, ServedIdentity, WorkCounters, read_snapshot
from gateway.placement.controller import PlacementController
from gateway.placement.election import FileElection
from gateway.placement.operator import StaticPlacement
from gateway.placement.order_calls import OrderCalls
from gateway.placement.state import PlacementPolicy
from gateway.scaling.scaler import NoScaler
from gateway.scaling.setup import make_scaler
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import STATEFUL_SETS
from tests.support.kube.store import Key
from tests.support.placements import some_experts
from tests.support.processes import poll
from tests.support.scripted_engine import tiny_config
from tests.support.watch_server import snapshot

WAIT_S = 30.0
ON = ScalingSettings(autoscale="on", min_expert_workers=4)


class NoWorkers:
    """Nobody answers yet."""

    all_heard = True

    def known_workers(self) -> tuple[KnownWorker, ...]:
        """None."""
        return ()

    def subscribe_news(self, on_news: Callable[[], None]) -> None:
        """There is none."""


async def until(condition: Callable[[], bool]) -> None:
    """Waits for it without holding the event loop up."""
    await asyncio.to_thread(poll, condition, timeout_s=WAIT_S, what="it comes")


def test_off_is_an_object_that_does_nothing() -> None:
    """The default; nothing is asked of a cluster."""
    scaler = make_scaler(ScalingSettings(), MeshOptions(), tuple, StaticPlacement())
    assert isinstance(scaler, NoScaler)


def test_static_placement_cannot_be_scaled() -> None:
    """New expert workers would hold nothing."""
    with pytest.raises(SettingsError, match="--placement auto"):
        make_scaler(ON, MeshOptions(), tuple, StaticPlacement())


async def test_the_leader_asks_for_what_is_missing(tmp_path: Path) -> None:
    """With a real election and over a socket; once it leads, and not before."""
    key = Key(STATEFUL_SETS, "default", "expert-worker")
    labels = {"app": "expert-worker"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": []}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    async with FakeApiServer() as server:
        server.store.create(
            STATEFUL_SETS, {"metadata": {"name": key.name}, "spec": spec}, key.namespace
        )
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        placement = PlacementController(
            NoWorkers(),
            some_experts(),
            PlacementPolicy(),
            FileElection(tmp_path / "lock"),
            partial(OrderCalls, Plaintext()),
        )
        mesh = MeshOptions(kubeconfig=str(kubeconfig))
        scaler = await asyncio.to_thread(make_scaler, ON, mesh, tuple, placement)
        try:
            placement.start()
            await until(lambda: placement.token is not None)
            assert not server.requests
            scaler.start()
            await until(lambda: server.store.get(key)["spec"]["replicas"] == 4)
        finally:
            await asyncio.to_thread(scaler.stop)
            await asyncio.to_thread(placement.stop)


def test_work_comes_from_snapshots() -> None:
    """In seconds; who says nothing of it, or counts otherwise, has done nothing."""
    state = snapshot("w", b"f", {})
    counts = [3] * (len(WAIT_BOUNDS_S) + 1)
    load = pb.LoadCounters(uptime_us=2_500_000, compute_us=1_000_000, calls_by_wait=counts)
    served = ServedIdentity("tiny", b"f", "float32")
    config = tiny_config()
    silent = read_snapshot(state, "a:1", served, config).known
    state.load.CopyFrom(load)
    known = read_snapshot(state, "a:1", served, config).known
    assert silent is not None
    assert known is not None
    assert silent.work == WorkCounters()
    assert known.work == WorkCounters(2.5, 1.0, tuple(counts))
    state.load.calls_by_wait.pop()
    other = read_snapshot(state, "a:1", served, config).known
    assert other is not None
    assert other.work == WorkCounters()
