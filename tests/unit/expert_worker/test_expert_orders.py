"""Watch, LoadExperts, UnloadExperts and Drain on a socket."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from expert_worker.server import SERVICE, ExpertServer
from expertmesh import PROTOCOL_REVISION
from expertmesh.checkpoint import Checkpoint
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from expertmesh.weight_storage import OnBytes
from tests.conftest import Models
from tests.support.direct_calls import ask, connection_to
from tests.support.expert_servers import ROW_CREDITS, expert_server, loaded_store
from tests.support.expert_wire import TIMEOUT_S, RawStream, channel, health, request
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

E = pb.ForwardError


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture
def server(checkpoint: Checkpoint) -> Iterator[ExpertServer]:
    """An expert worker with experts 0 to 3 of each layer."""
    with expert_server(loaded_store(checkpoint, "float32", "0-3"), max_streams=2) as started:
        yield started


def test_watch_tells_everything_at_once(server: ExpertServer) -> None:
    """The first snapshot has identity, model, capacity and residency."""
    with channel(server) as opened:
        state = next(iter(rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest())))
    store = server.state.store
    assert (state.worker_id, state.device, state.draining) == ("worker", "cpu", False)
    assert state.incarnation == server.state.identity.incarnation
    assert state.protocol_revision == PROTOCOL_REVISION
    assert state.numerics_fingerprint == b"numerics"
    assert state.model.fingerprint == store.checkpoint.fingerprint
    assert (state.model.num_layers, state.model.num_experts, state.model.hidden_size) == (3, 8, 48)
    assert state.model.dtype == pb.DTYPE_FLOAT32
    assert (state.capacity.expert_slots, state.capacity.used_expert_slots) == (24, 12)
    assert state.capacity.resident_bytes == store.resident_bytes
    held = {layer.layer: list(layer.resident) for layer in state.layers}
    assert held == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
    assert state.row_credits == ROW_CREDITS
    assert state.node == "a machine"


def test_watch_tells_changes_at_once(server: ExpertServer) -> None:
    """A change of residency comes long before the heartbeat."""
    with channel(server) as opened:
        watch = iter(rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(heartbeat_ms=60_000)))
        first = next(watch)
        started = time.monotonic()
        server.state.store.load(1, 7)
        second = next(watch)
        assert time.monotonic() - started < 5.0
        assert list(second.layers[1].resident) == [0, 1, 2, 3, 7]
        assert second.sequence > first.sequence


def test_watch_counts_the_pairs_of_each_expert(server: ExpertServer) -> None:
    """One number for each resident expert, of calls that Python and compiled code answered."""
    for answered_directly in (False, True):
        with channel(server) as opened:
            before = server.state.snapshot()
            message = request(server)
            if answered_directly:
                with connection_to(server) as direct:
                    assert ask(direct, message.SerializeToString()).HasField("outputs")
            else:
                (reply,) = RawStream(opened, [message.SerializeToString()]).read()
                assert reply.HasField("outputs")
            after = server.state.snapshot()
        chosen = Counter(np.frombuffer(message.expert_ids, "<u4").tolist())
        for old, new in zip(before.layers, after.layers, strict=True):
            added = [b - a for a, b in zip(old.pairs, new.pairs, strict=True)]
            here = new.layer == message.id.layer
            assert added == [chosen[expert] if here else 0 for expert in new.resident]


def test_many_changes_make_few_snapshots(server: ExpertServer) -> None:
    """As experts come one after the other, and the last snapshot has all of them."""
    with channel(server) as opened:
        watch = iter(rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(heartbeat_ms=60_000)))
        began_s, first = time.monotonic(), next(watch)
        for expert in (4, 5, 6, 7):
            for layer in (0, 1, 2):
                server.state.store.load(layer, expert)
        last = first
        while last.capacity.used_expert_slots < 24:
            last = next(watch)
    most = (time.monotonic() - began_s) / 0.02 + 2
    assert last.sequence - first.sequence <= most


def test_watch_has_a_heartbeat(server: ExpertServer) -> None:
    """Without changes snapshots still come."""
    with channel(server) as opened:
        watch = iter(rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(heartbeat_ms=50)))
        snapshots = [next(watch) for _ in range(3)]
    assert [s.sequence - snapshots[0].sequence for s in snapshots] == [0, 1, 2]


def test_watch_ends_promptly_at_shutdown(checkpoint: Checkpoint) -> None:
    """Stopping does not wait for heartbeats or open streams; health says NOT_SERVING first."""
    with (
        expert_server(loaded_store(checkpoint, "float32", "0")) as server,
        channel(server) as opened,
    ):
        assert health(opened, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        watch = rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(heartbeat_ms=60_000))
        is_open = threading.Event()

        def read() -> list[bool]:
            seen = []
            for snapshot in watch:
                seen.append(snapshot.draining)
                is_open.set()
            return seen

        with ThreadPoolExecutor(1, "watcher") as pool:
            seen = pool.submit(read)
            assert is_open.wait(TIMEOUT_S)
            started = time.monotonic()
            server.stop(0.2)
            assert time.monotonic() - started < 3.0
            assert seen.result(TIMEOUT_S)[-1]


def test_a_watch_that_left_makes_room(server: ExpertServer) -> None:
    """Watches are limited; one that is cancelled is noticed at once."""
    with channel(server) as opened:
        stub = rpc.ExpertServiceStub(opened)
        watches = [stub.Watch(pb.WatchRequest(heartbeat_ms=60_000)) for _ in range(2)]
        for watch in watches:
            next(iter(watch))
        with pytest.raises(grpc.RpcError, match="2 watches are open already"):
            next(iter(stub.Watch(pb.WatchRequest())))
        watches[0].cancel()

        def has_room() -> bool:
            try:
                next(iter(stub.Watch(pb.WatchRequest(), timeout=TIMEOUT_S)))
            except grpc.RpcError:
                return False
            return True

        poll(has_room, timeout_s=5.0, what="the place is free")


# --- orders ---


def test_malformed_orders_are_invalid(server: ExpertServer) -> None:
    """Bytes that are no message give INVALID_ARGUMENT, not UNKNOWN."""
    with channel(server) as opened:
        for method in ("Watch", "LoadExperts", "UnloadExperts", "Drain"):
            call = opened.unary_stream(f"/{SERVICE}/{method}", bytes, bytes)
            with pytest.raises(grpc.RpcError) as caught:
                list(call(b"\xff\xff", timeout=TIMEOUT_S))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "2 bytes are not a" in str(caught.value.details())


def load_order(
    server: ExpertServer, experts: list[tuple[int, int]], token: int = 1
) -> pb.LoadExpertsRequest:
    return pb.LoadExpertsRequest(
        incarnation=server.state.identity.incarnation,
        leader_token=token,
        experts=[pb.ExpertId(layer=layer, expert=expert) for layer, expert in experts],
    )


def test_load_reports_progress(server: ExpertServer) -> None:
    """Two messages for each expert; a failure names its reason and does not stop the rest."""
    with channel(server) as opened:
        message = load_order(server, [(0, 6), (0, 99), (0, 1)])
        events = list(rpc.ExpertServiceStub(opened).LoadExperts(message, timeout=TIMEOUT_S))
    assert [(event.expert.expert, event.state) for event in events] == [
        (6, pb.EXPERT_STATE_LOADING),
        (6, pb.EXPERT_STATE_RESIDENT),
        (99, pb.EXPERT_STATE_LOADING),
        (99, pb.EXPERT_STATE_FAILED),
        (1, pb.EXPERT_STATE_LOADING),
        (1, pb.EXPERT_STATE_RESIDENT),
    ]
    assert events[3].message == "layer 0 has experts 0 to 7, not 99"
    assert server.state.store.residency()[0].resident == (0, 1, 2, 3, 6)


def _no_memory() -> int:
    return 10


def _fails_to_allocate(*_: object) -> object:
    raise MemoryError


@pytest.mark.parametrize(
    ("target", "replacement", "reason"),
    [
        ("expert_worker.memory.available_host_memory", _no_memory, "too little memory to load"),
        ("expert_worker.expert_reader.pack_expert", _fails_to_allocate, "MemoryError"),
    ],
)
def test_without_memory_an_order_fails_and_nothing_else(
    server: ExpertServer,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    replacement: Callable[..., object],
    reason: str,
) -> None:
    """The order says why; the expert worker answers as before, and loads once there is memory."""
    message = load_order(server, [(1, 6)])
    with channel(server) as opened:
        stub = rpc.ExpertServiceStub(opened)
        with monkeypatch.context() as patched:
            patched.setattr(target, replacement)
            *_, failed = stub.LoadExperts(message, timeout=TIMEOUT_S)
        assert failed.state == pb.EXPERT_STATE_FAILED
        assert failed.message.startswith(reason)
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.HasField("outputs")
        *_, loaded = stub.LoadExperts(message, timeout=TIMEOUT_S)
        assert loaded.state == pb.EXPERT_STATE_RESIDENT


def test_unload_has_two_phases(server: ExpertServer) -> None:
    """An expert is first retiring and still answers; after its time it is gone."""
    which = load_order(server, [(1, 3), (1, 7)])
    message = pb.UnloadExpertsRequest(
        incarnation=which.incarnation,
        leader_token=which.leader_token,
        experts=which.experts,
        retire_ms=1000,
    )
    with channel(server) as opened:
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.HasField("outputs")  # kernels are loaded: the next call takes milliseconds
        events = iter(rpc.ExpertServiceStub(opened).UnloadExperts(message, timeout=TIMEOUT_S))
        retiring = [next(events), next(events)]
        assert [event.state for event in retiring] == [pb.EXPERT_STATE_RETIRING] * 2
        assert server.state.store.residency()[1].retiring == (3,)
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.HasField("outputs")
        assert [event.state for event in events] == [pb.EXPERT_STATE_UNLOADED] * 2
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.error.code == E.CODE_EXPERT_NOT_RESIDENT


def test_loading_does_not_block_calls(
    server: ExpertServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are answered while an expert is being read, in a thread that is behind theirs."""
    priorities: list[int] = []
    gate, reading = threading.Event(), threading.Event()
    read = server.state.store.checkpoint.read_expert

    def slow_read(layer: int, expert: int, on_bytes: OnBytes) -> object:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        reading.set()
        gate.wait(TIMEOUT_S)
        return read(layer, expert, on_bytes)

    monkeypatch.setattr(server.state.store.checkpoint, "read_expert", slow_read)
    message = load_order(server, [(1, 6)])
    with channel(server) as opened:
        events = iter(rpc.ExpertServiceStub(opened).LoadExperts(message, timeout=TIMEOUT_S))
        assert next(events).state == pb.EXPERT_STATE_LOADING
        assert reading.wait(TIMEOUT_S)
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.HasField("outputs")
        gate.set()
        assert next(events).state == pb.EXPERT_STATE_RESIDENT
    assert priorities[0] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


Orders = Callable[[rpc.ExpertServiceStub], Iterable[object]]


def test_orders_are_fenced(server: ExpertServer) -> None:
    """Orders for another life, of a past leader, or out of bounds are refused."""
    own = server.state.identity.incarnation
    none: list[tuple[int, int]] = []
    with channel(server) as opened:
        stub = rpc.ExpertServiceStub(opened)
        list(stub.LoadExperts(load_order(server, none, token=7)))
        refused: list[tuple[Iterable[object], grpc.StatusCode, str]] = [
            (
                stub.LoadExperts(load_order(server, none, token=6)),
                grpc.StatusCode.FAILED_PRECONDITION,
                "leader_token is 6, but 7 was seen",
            ),
            (
                stub.UnloadExperts(pb.UnloadExpertsRequest(incarnation=3, leader_token=9)),
                grpc.StatusCode.FAILED_PRECONDITION,
                "incarnation is 0x3",
            ),
            (
                stub.Drain(pb.DrainRequest(incarnation=3)),
                grpc.StatusCode.FAILED_PRECONDITION,
                "incarnation is 0x3",
            ),
            (
                stub.UnloadExperts(
                    pb.UnloadExpertsRequest(incarnation=own, leader_token=7, retire_ms=2**32 - 1)
                ),
                grpc.StatusCode.INVALID_ARGUMENT,
                "retire_ms is 4294967295",
            ),
            (
                stub.LoadExperts(load_order(server, [(0, 0)] * 49, token=7)),
                grpc.StatusCode.INVALID_ARGUMENT,
                "experts has 49 entries, expected at most 48",
            ),
        ]
        for call, code, text in refused:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() == code
            assert text in str(caught.value.details())
