"""Health checks for an orchestrator, and what it runs before it ends an expert worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expert_worker.hand_over import hand_over
from expert_worker.probe_server import ProbeServer
from expert_worker.probes import probes
from expert_worker.server import ExpertServer
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import PortError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.support.expert_servers import expert_server, loaded_store
from tests.support.expert_wire import TIMEOUT_S, channel, health
from tests.support.processes import free_port, run

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def asked() -> Iterator[ProbeServer]:
    """A probe server."""
    with probes("127.0.0.1", 0) as server:
        assert isinstance(server, ProbeServer)
        yield server


@pytest.fixture
def says(asked: ProbeServer) -> Iterator[Callable[[], tuple[int, ...]]]:
    """What it answers for startup, readiness and liveness."""
    with grpc.insecure_channel(f"127.0.0.1:{asked.port}") as opened:
        yield lambda: tuple(health(opened, name) for name in ("startup", "readiness", "liveness"))


def test_each_question_has_its_own_answer(
    asked: ProbeServer, says: Callable[[], tuple[int, ...]]
) -> None:
    """Alive from the start; started for good once it was ready; ready while it answers calls."""
    assert says() == (NOT_SERVING, NOT_SERVING, SERVING)
    asked.set_ready(True)
    assert says() == (SERVING, SERVING, SERVING)
    asked.set_ready(False)
    assert says() == (SERVING, NOT_SERVING, SERVING)


def test_nothing_else_is_answered(asked: ProbeServer) -> None:
    """Neither other services, nor checks that would hold a thread, nor calls of the mesh."""
    with grpc.insecure_channel(f"127.0.0.1:{asked.port}") as opened:
        with pytest.raises(grpc.RpcError, match="startup, readiness, liveness") as unknown:
            health(opened, "")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        for call in (
            health_pb2_grpc.HealthStub(opened).Watch(
                health_pb2.HealthCheckRequest(service="liveness"), timeout=TIMEOUT_S
            ),
            rpc.ExpertServiceStub(opened).Watch(pb.WatchRequest(), timeout=TIMEOUT_S),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_port_that_is_taken() -> None:
    """The error names address and flag."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError) as error, probes("127.0.0.1", port):
            pass
    assert error.value.message == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert error.value.fix == "choose another --health-port"


def test_ready_until_calls_are_refused(checkpoint: Checkpoint) -> None:
    """A drain leaves it ready as long as it answers; then it is not, before it ends."""
    told: list[tuple[bool, bool]] = []

    def tell(ready: bool) -> None:
        told.append((ready, bool(servers and servers[0].state.refusing[0])))

    servers: list[ExpertServer] = []
    with expert_server(loaded_store(checkpoint, "float32", "0"), on_ready=tell) as server:
        servers.append(server)
        assert told == [(True, False)]
        server.state.begin_drain(TIMEOUT_S)
        assert told == [(True, False)]
    assert told == [(True, False), (False, False)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that end with the test."""
    with ThreadPoolExecutor(2, "test-hand-over") as found:
        yield found


def test_a_hand_over_waits_for_the_last_expert(
    checkpoint: Checkpoint, pool: ThreadPoolExecutor
) -> None:
    """It orders a drain, and ends when the expert worker has handed its experts over."""
    ends: list[object] = []
    store = loaded_store(checkpoint, "float32", "0")
    with (
        expert_server(store, on_drain=lambda: ends.append(pool.submit(server.stop))) as server,
        channel(server) as opened,
    ):
        stub = rpc.ExpertServiceStub(opened)
        watch = stub.Watch(pb.WatchRequest(hands_over=True))
        next(watch)
        over = pool.submit(hand_over, opened, TIMEOUT_S)
        assert any(snapshot.draining for snapshot in watch)
        assert not over.done()
        unload = pb.UnloadExpertsRequest(
            incarnation=server.state.identity.incarnation,
            experts=[pb.ExpertId(layer=layer, expert=0) for layer in (0, 1, 2)],
        )
        list(stub.UnloadExperts(unload, timeout=TIMEOUT_S))
        assert over.result(TIMEOUT_S) == "done, 0 experts left"
    assert len(ends) == 1


def test_a_hand_over_takes_no_longer_than_it_may(server: ExpertServer) -> None:
    """An expert worker that goes on draining is left to SIGTERM."""
    with channel(server) as opened:
        assert hand_over(opened, 0.5) == "out of time, 12 experts left"
        assert server.state.draining


@contextmanager
def breaks_off(code: grpc.StatusCode) -> Iterator[grpc.Channel]:
    """A connection to an expert worker whose drain breaks off with a code."""

    class BreaksOff(rpc.ExpertServiceServicer):
        def Watch(self, request: object, context: object) -> Iterator[pb.WatchResponse]:
            yield pb.WatchResponse(incarnation=7)

        def Drain(
            self, request: pb.DrainRequest, context: grpc.ServicerContext
        ) -> Iterator[pb.DrainResponse]:
            assert request.incarnation == 7
            yield pb.DrainResponse(experts_left=3)
            context.abort(code, "broken off")

    with ThreadPoolExecutor(2, "test-breaks-off") as threads:
        server = grpc.server(threads)
        rpc.add_ExpertServiceServicer_to_server(BreaksOff(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
                yield opened
        finally:
            server.stop(0).wait(TIMEOUT_S)


def test_the_end_of_the_process_is_the_end_of_the_hand_over() -> None:
    """Its last words may be lost."""
    with breaks_off(grpc.StatusCode.UNAVAILABLE) as opened:
        assert hand_over(opened, TIMEOUT_S) == "done, 3 experts left"


def test_a_refusal_is_told() -> None:
    """An expert worker that does not take the order has not handed over."""
    with (
        breaks_off(grpc.StatusCode.FAILED_PRECONDITION) as opened,
        pytest.raises(grpc.RpcError, match="broken off"),
    ):
        hand_over(opened, TIMEOUT_S)


def test_nobody_there() -> None:
    """Without an expert worker there is nothing to hand over, which is no failure."""
    port = free_port()
    argv = ["-m", "expert_worker.hand_over", "--port", str(port)]
    ended = run(argv, env={"POD_IP": "127.77.0.9"})
    assert ended.returncode == 0
    assert "not handed over, SIGTERM will do" in ended.stderr
    assert f"127.77.0.9:{port}" in ended.stderr
