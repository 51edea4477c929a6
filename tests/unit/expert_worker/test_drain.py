"""How an expert worker leaves while others serve."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2

from expert_worker.server import ExpertServer
from expertmesh.checkpoint import Checkpoint
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.support.expert_servers import expert_server, loaded_store
from tests.support.expert_wire import TIMEOUT_S, RawStream, busy_device, channel, health, request
from tests.support.processes import poll

E = pb.ForwardError
LONG_S = 60.0
"""A grace that no test waits for."""


@pytest.fixture
def opened(server: ExpertServer) -> Iterator[grpc.Channel]:
    """A connection to the expert worker."""
    with channel(server) as found:
        yield found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that end with the test."""
    with ThreadPoolExecutor(4, "test-drain") as found:
        yield found


class Gateway:
    """Watches an expert worker, as a gateway does."""

    def __init__(self, opened: grpc.Channel, pool: ThreadPoolExecutor, *, hands_over: bool) -> None:
        self.stub = rpc.ExpertServiceStub(opened)
        message = pb.WatchRequest(heartbeat_ms=60_000, hands_over=hands_over)
        self._watch = self.stub.Watch(message)
        self.seen = [next(self._watch)]
        self._reader = pool.submit(self._read)

    @property
    def says(self) -> pb.WatchResponse:
        """The newest snapshot."""
        return self.seen[-1]

    def leave(self) -> None:
        """Watches no more."""
        self._watch.cancel()

    def _read(self) -> None:
        try:
            self.seen.extend(self._watch)
        except grpc.RpcError:
            return

    def wait_draining(self) -> None:
        """Until it is told that a drain has begun."""
        poll(lambda: self.says.draining, timeout_s=TIMEOUT_S, what="a drain is announced")

    def wait_end(self) -> None:
        """Until its stream has ended."""
        self._reader.result(TIMEOUT_S)

    def unload(self, server: ExpertServer, layers: tuple[int, ...] = (0, 1, 2)) -> None:
        """Moves the experts of these layers away."""
        message = pb.UnloadExpertsRequest(
            incarnation=server.state.identity.incarnation,
            leader_token=1,
            experts=[
                pb.ExpertId(layer=layer, expert=expert) for layer in layers for expert in range(4)
            ],
        )
        list(self.stub.UnloadExperts(message, timeout=TIMEOUT_S))


def answers(opened: grpc.Channel, server: ExpertServer) -> bool:
    """True if a call is answered with outputs."""
    (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
    assert reply.HasField("outputs") or reply.error.code == E.CODE_DRAINING
    return reply.HasField("outputs")


@contextmanager
def stopping(server: ExpertServer, pool: ThreadPoolExecutor) -> Iterator[Future[None]]:
    """The server is told to stop, with all the time in the world."""
    yield pool.submit(server.stop, LONG_S)


def test_experts_are_handed_over(
    server: ExpertServer, opened: grpc.Channel, pool: ThreadPoolExecutor
) -> None:
    """It says that it drains, answers, stays healthy and takes no new experts, until the last one
    is unloaded."""
    gateway = Gateway(opened, pool, hands_over=True)
    own = server.state.identity.incarnation
    with stopping(server, pool) as ended:
        gateway.wait_draining()
        assert answers(opened, server)
        assert health(opened) == health_pb2.HealthCheckResponse.SERVING
        load = pb.LoadExpertsRequest(incarnation=own, leader_token=1)
        with pytest.raises(grpc.RpcError, match="expert worker worker is draining") as refused:
            list(gateway.stub.LoadExperts(load, timeout=TIMEOUT_S))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        gateway.unload(server, (0, 2))
        assert answers(opened, server)
        assert not ended.done()
        poll(lambda: gateway.says.drain.experts_left == 4, timeout_s=TIMEOUT_S, what="it tells")
        assert 0 < gateway.says.drain.time_left_ms < LONG_S * 1000
        gateway.unload(server, (1,))
        ended.result(TIMEOUT_S)
    gateway.wait_end()
    assert gateway.says.drain.experts_left == 0


@pytest.mark.parametrize("watch", ["none", "without handing over", "until the drain begins"])
def test_nobody_is_waited_for_who_takes_no_experts(
    server: ExpertServer, opened: grpc.Channel, pool: ThreadPoolExecutor, watch: str
) -> None:
    """Neither without a gateway, nor with one that moves no experts or has left."""
    gateway = None
    if watch != "none":
        gateway = Gateway(opened, pool, hands_over=watch != "without handing over")
    with stopping(server, pool) as ended:
        if gateway is not None and watch == "until the drain begins":
            gateway.wait_draining()
            assert not ended.done()
            gateway.leave()
        ended.result(TIMEOUT_S)
    assert server.state.store.num_used_slots == 12


def test_the_time_of_a_drain_is_bounded(
    server: ExpertServer, opened: grpc.Channel, pool: ThreadPoolExecutor
) -> None:
    """A gateway that promises to move experts and does not is waited for no longer."""
    gateway = Gateway(opened, pool, hands_over=True)
    pool.submit(server.stop, 0.5).result(TIMEOUT_S)
    gateway.wait_end()
    assert gateway.says.drain.experts_left == 12


def test_a_start_that_failed_waits_for_nobody(
    server: ExpertServer, opened: grpc.Channel, pool: ThreadPoolExecutor
) -> None:
    """A drain that was begun without any time keeps to that, whatever else `stop` allows."""
    gateway = Gateway(opened, pool, hands_over=True)
    server.state.begin_drain(0.0)
    pool.submit(server.stop, LONG_S).result(TIMEOUT_S)
    gateway.wait_end()
    assert gateway.says.drain.time_left_ms == 0


def test_calls_in_flight_are_answered(checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
    """An order to drain: new calls are refused once nothing is left to hand over, and it ends when
    the last call has ended. A second order changes nothing, and tells as much."""
    told = threading.Event()
    with (
        expert_server(loaded_store(checkpoint, "float32", "0-3"), on_drain=told.set) as server,
        channel(server) as opened,
    ):
        message = request(server).SerializeToString()
        order = pb.DrainRequest(
            incarnation=server.state.identity.incarnation, timeout_ms=int(LONG_S * 1000)
        )
        stub = rpc.ExpertServiceStub(opened)
        with busy_device(server):
            slow = RawStream(opened, [message])
            poll(lambda: server.state.calls_in_flight == 1, timeout_s=TIMEOUT_S, what="it waits")
            drains = [stub.Drain(order), stub.Drain(pb.DrainRequest(incarnation=order.incarnation))]
            for drain in drains:
                first = next(drain)
                assert (first.calls_in_flight, first.experts_left) == (1, 12)
            assert told.wait(TIMEOUT_S)
            ended = pool.submit(server.stop)  # what a process does when it is told
            poll(lambda: bool(server.state.refusing[0]), timeout_s=TIMEOUT_S, what="it refuses")
            assert not answers(opened, server)
            assert not ended.done()
            assert server.state.drain_left_s > LONG_S / 2
        assert [reply.HasField("outputs") for reply in slow.read()] == [True]
        assert [list(drain)[-1].drained for drain in drains] == [True, True]
        ended.result(TIMEOUT_S)
