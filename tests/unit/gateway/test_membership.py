"""Expert workers come, change, hang and go: maps and statuses follow, each within its time."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from expertmesh import PROTOCOL_REVISION
from expertmesh.model_config import ModelConfig
from expertmesh.placement import ExpertMap
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.mesh.discovery import Discovery, Endpoint, OnEndpoints, StaticDiscovery
from gateway.mesh.membership import ExpertWorkerState, Membership, MeshStatus, ServedIdentity
from tests.support.small_config import model
from tests.support.watch_server import WatchServer, snapshot

FINGERPRINT = bytes(range(32))
SERVED = ServedIdentity("tiny", FINGERPRINT, "float32", max_step_tokens=64)
HEARTBEAT_S = 0.2
WAIT_S = 10.0
LOW, HIGH = {1: [0, 1], 2: [0, 1]}, {1: [2, 3], 2: [2, 3]}


class Watched:
    """A membership and what it told."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.maps: list[ExpertMap] = []
        membership.subscribe(self.maps.append)

    def until(
        self, condition: Callable[[MeshStatus], bool], within_s: float = WAIT_S
    ) -> MeshStatus:
        """The first status for which the condition holds."""
        deadline = time.monotonic() + within_s
        pause = threading.Event()
        while not condition(status := self.membership.status()):
            assert time.monotonic() < deadline, f"still {status}"
            pause.wait(0.01)
        return status

    def map_of(self, status: MeshStatus) -> ExpertMap:
        """The map that a status speaks of; listeners get it a moment after the status is there."""
        self.until(lambda _: bool(self.maps) and self.maps[-1].epoch >= status.epoch)
        return self.maps[-1]

    def until_state(self, state: ExpertWorkerState, within_s: float = WAIT_S) -> str:
        """Waits until the only expert worker is in this state; returns the message."""
        status = self.until(lambda status: status.workers[0].state is state, within_s)
        return status.workers[0].message


@contextmanager
def watching(
    *addresses: str,
    heartbeat_s: float = HEARTBEAT_S,
    config: ModelConfig | None = None,
    discovery: Discovery | None = None,
) -> Iterator[Watched]:
    """A membership that follows these addresses; no thread of it is left afterwards."""
    discovery = discovery or StaticDiscovery(addresses)
    membership = Membership(discovery, SERVED, config or model(), heartbeat_s=heartbeat_s)
    watched = Watched(membership)
    membership.start()
    try:
        watched.until(lambda status: len(status.workers) == len(addresses))
        yield watched
    finally:
        membership.stop()
    names = [thread.name for thread in threading.enumerate()]
    assert [n for n in names if n == "membership" or n.startswith("watch-1")] == []


def is_ready(status: MeshStatus) -> bool:
    """Every expert is covered."""
    return status.ready


def test_expert_workers_are_folded_into_a_map() -> None:
    """Two halves of the experts make the mesh ready; the map names both."""
    low, high = snapshot("w0", FINGERPRINT, LOW), snapshot("w1", FINGERPRINT, HIGH, incarnation=9)
    with (
        WatchServer(low) as first,
        WatchServer(high) as second,
        watching(first.address, second.address) as watched,
    ):
        status = watched.until(is_ready)
        newest = watched.map_of(status)
    assert [worker.worker_id for worker in newest.workers] == ["w0", "w1"]
    assert newest.workers[1].incarnation == 9
    assert newest.workers[1].resident == {1: (2, 3), 2: (2, 3)}
    assert status.epoch == newest.epoch
    assert [worker.num_experts for worker in sorted(status.workers, key=lambda w: w.worker_id)] == [
        4,
        4,
    ]


def test_uncovered_experts_are_named() -> None:
    """With half of the experts the status says which are missing."""
    with (
        WatchServer(snapshot("w0", FINGERPRINT, LOW)) as server,
        watching(server.address) as watched,
    ):
        watched.until_state(ExpertWorkerState.READY)
        status = watched.until(lambda status: status.epoch > 0)
    assert status.uncovered == {1: (2, 3), 2: (2, 3)}
    assert not status.ready


def test_heartbeats_make_no_new_map() -> None:
    """A snapshot that changes nothing does not count as a change."""
    with (
        WatchServer(snapshot("w0", FINGERPRINT, LOW)) as server,
        watching(server.address, heartbeat_s=0.02) as watched,
    ):
        watched.map_of(watched.until(lambda status: status.epoch == 1))
        threading.Event().wait(0.3)
        assert [m.epoch for m in watched.maps] == [1]


def test_a_change_of_residency_makes_a_new_map() -> None:
    """An expert that was loaded can be used; one that retires no longer."""
    with (
        WatchServer(snapshot("w0", FINGERPRINT, LOW)) as server,
        watching(server.address) as watched,
    ):
        watched.until(lambda status: status.epoch == 1)
        server.change(snapshot("w0", FINGERPRINT, {1: [0, 1, 2, 3], 2: [1, 2, 3]}))
        status = watched.until(lambda status: status.epoch == 2)
    assert status.uncovered == {2: (0,)}


def test_an_expert_worker_that_starts_is_not_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An address that answers within the patience for starts is in the status, not in the log."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with caplog.at_level(logging.INFO), watching(f"127.0.0.1:{port}") as watched:
        watched.until(lambda status: status.workers[0].message == "connection refused", 2.0)
        both = {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
        with WatchServer(snapshot("w0", FINGERPRINT, both), port=port):
            watched.until(is_ready)
            assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_refused_connection_is_named_and_recovers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens: said once, with the address; someone listens later: used at once."""
    monkeypatch.setattr("gateway.mesh.member.START_PATIENCE_S", 0.1)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with caplog.at_level(logging.INFO), watching(f"127.0.0.1:{port}") as watched:
        watched.until(lambda status: status.workers[0].message == "connection refused", 5.0)
        threading.Event().wait(0.4)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warnings == [
            f"no expert worker answers at 127.0.0.1:{port} yet: connection refused; trying on"
        ]
        both = {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
        with WatchServer(snapshot("w0", FINGERPRINT, both), port=port):
            watched.until(is_ready)
        watched.until_state(ExpertWorkerState.UNREACHABLE)
        assert not watched.membership.status().ready


def test_a_silent_address_is_unreachable_within_five_seconds() -> None:
    """Something accepts connections and says nothing, with the heartbeat of production."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with watching(address, heartbeat_s=1.0) as watched:
            status = watched.until(
                lambda status: status.workers[0].message == "no answer within 3 s", 5.0
            )
    assert status.workers[0].state is ExpertWorkerState.UNREACHABLE
    assert status.workers[0].address == address


def test_a_hung_expert_worker_leaves_the_map_and_comes_back() -> None:
    """Three heartbeats without a snapshot: unreachable; the stream speaks again: ready."""
    with (
        WatchServer(snapshot("w0", FINGERPRINT, LOW)) as server,
        watching(server.address) as watched,
    ):
        watched.until_state(ExpertWorkerState.READY)
        server.set_mute(True)
        assert watched.until_state(ExpertWorkerState.UNREACHABLE) == "no answer within 0.6 s"
        assert watched.until(lambda status: status.epoch == 2).uncovered == {
            1: (0, 1, 2, 3),
            2: (0, 1, 2, 3),
        }
        assert watched.membership.status().workers[0].worker_id == "w0"
        server.set_mute(False)
        watched.until_state(ExpertWorkerState.READY)


def test_a_draining_expert_worker_is_leaving() -> None:
    """It says so itself; it stays in the map for what nobody else holds."""
    state = snapshot("w0", FINGERPRINT, LOW)
    with WatchServer(state) as server, watching(server.address) as watched:
        watched.until(lambda status: status.epoch == 1)
        drained = pb.WatchResponse()
        drained.CopyFrom(state)
        drained.draining = True
        server.change(drained)
        watched.until_state(ExpertWorkerState.DRAINING)
        status = watched.until(lambda status: status.epoch == 2)
        (leaving,) = watched.map_of(status).workers
        assert leaving.leaving
        assert status.uncovered[1] == (2, 3)
        assert [known.view.leaving for known in watched.membership.known_workers()] == [True]


def test_further_copies_come_together() -> None:
    """Copies of covered experts that are reported one after the other make few maps, and none is
    forgotten; a first copy makes one at once."""
    low = snapshot("w0", FINGERPRINT, LOW)
    with (
        WatchServer(low) as first,
        WatchServer(snapshot("w1", FINGERPRINT, {1: [], 2: []})) as second,
        watching(first.address, second.address) as watched,
    ):
        watched.until(lambda status: all(w.worker_id for w in status.workers))
        pause = threading.Event()
        for count in range(1, 4):  # 0 and 1 are there already
            second.change(snapshot("w1", FINGERPRINT, {1: list(range(count)), 2: []}))
            pause.wait(0.02)
        covered = watched.until(lambda status: 2 not in status.uncovered[1])
        assert watched.map_of(covered).holders[1, 2] == (1,)
        num_maps = len(watched.maps)
        for count in range(1, 3):
            second.change(snapshot("w1", FINGERPRINT, {1: [0, 1, 2], 2: list(range(count))}))
            pause.wait(0.02)
        watched.until(lambda _: watched.maps[-1].holders.get((2, 1)) == (0, 1))
        assert len(watched.maps) <= num_maps + 2


def wrong_revision(state: pb.WatchResponse) -> None:
    """Another protocol revision."""
    state.protocol_revision = 99


def wrong_model(state: pb.WatchResponse) -> None:
    """Another model."""
    state.model.fingerprint = b"\xff" * 32
    state.model.name = "other"


def wrong_dtype(state: pb.WatchResponse) -> None:
    """Another dtype."""
    state.model.dtype = pb.DTYPE_BFLOAT16


def wrong_expert_dtype(state: pb.WatchResponse) -> None:
    """Experts quantised on load."""
    state.model.expert_dtype = "int8 per channel"


def few_credits(state: pb.WatchResponse) -> None:
    """Less room than the largest step needs."""
    state.row_credits = 1


def unknown_expert(state: pb.WatchResponse) -> None:
    """An expert that the model does not have."""
    state.layers.add(layer=0, resident=[7])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (wrong_revision, f"it has protocol revision 99, this gateway {PROTOCOL_REVISION}"),
        (
            wrong_model,
            "it serves model other (ffffffffffffffff), this gateway tiny (0001020304050607)",
        ),
        (wrong_dtype, "it has dtype bfloat16, this gateway float32"),
        (
            wrong_expert_dtype,
            "it has experts in int8 per channel, this gateway in float32 (--expert-dtype of both)",
        ),
        (
            few_credits,
            "it grants 1 row credits, fewer than the 64 tokens of a step "
            "(its --row-credits, this gateway's --max-num-batched-tokens)",
        ),
        (unknown_expert, "it reports layer 0 expert 7, which the model does not have"),
    ],
)
def test_an_incompatible_expert_worker_is_never_used(
    change: Callable[[pb.WatchResponse], None], expected: str
) -> None:
    """The status says what differs, with both values; nothing is routed there."""
    state = snapshot("w0", FINGERPRINT, LOW)
    change(state)
    with WatchServer(state) as server, watching(server.address) as watched:
        assert watched.until_state(ExpertWorkerState.INCOMPATIBLE) == expected
        assert watched.maps == []


def test_two_expert_workers_cannot_have_one_id() -> None:
    """The second one with an id is incompatible, and the message names the first."""
    state = snapshot("w0", FINGERPRINT, LOW)
    with (
        WatchServer(state) as first,
        WatchServer(state) as second,
        watching(first.address, second.address) as watched,
    ):
        status = watched.until(
            lambda status: (
                {worker.state for worker in status.workers}
                == {ExpertWorkerState.READY, ExpertWorkerState.INCOMPATIBLE}
            )
        )
    states = {worker.state: worker for worker in status.workers}
    other = states[ExpertWorkerState.READY].address
    message = states[ExpertWorkerState.INCOMPATIBLE].message
    assert message == f"worker id w0 is also used by {other}, expected another one"


def test_a_dense_model_is_ready_alone() -> None:
    """Without expert layers nothing is missing."""
    with watching(config=model(moe=False)) as watched:
        assert watched.membership.status() == MeshStatus(epoch=0, ready=True)


def test_a_colocated_gateway_is_ready_alone() -> None:
    """Experts inside the attention worker need no expert worker."""
    membership = Membership(StaticDiscovery(()), SERVED, model(), colocated=True)
    assert membership.status() == MeshStatus(epoch=0, ready=True)


class ToldDiscovery(StaticDiscovery):
    """Endpoints that a test changes."""

    tell: OnEndpoints

    def start(self, on_change: OnEndpoints) -> None:
        """Keeps whom to tell."""
        self.tell = on_change
        super().start(on_change)


def test_discovery_knows_of_an_end_first() -> None:
    """A pod that terminates leaves before it says so; one that serves no more is left out. The node
    that Kubernetes names is the one that counts."""
    with WatchServer(snapshot("w0", FINGERPRINT, LOW)) as server:
        discovery = ToldDiscovery([server.address])
        with watching(server.address, discovery=discovery) as watched:
            watched.until_state(ExpertWorkerState.READY)
            discovery.tell((Endpoint(server.address, leaving=True, node="n7"),))
            assert "sole copies only" in watched.until_state(ExpertWorkerState.DRAINING)
            newest = watched.map_of(watched.until(lambda status: status.epoch == 2))
            assert [worker.leaving for worker in newest.workers] == [True]
            view = watched.membership.known_workers()[0].view
            assert (view.leaving, view.node) == (True, "n7")
            discovery.tell((Endpoint(server.address),))
            watched.until_state(ExpertWorkerState.READY)
            discovery.tell(())
            assert watched.until(lambda status: not status.workers).uncovered
