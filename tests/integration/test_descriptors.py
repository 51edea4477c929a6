"""A gateway that strangers connect to more often than it has descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.descriptor_shares import DescriptorShares
from tests.support.api import Json, completion_body, generated_of, tokens_of_events
from tests.support.mesh import Server, gateway
from tests.support.processes import poll

LIMIT = 256
"""What the process may have; it starts with a quarter of that."""
LIMITED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT // 4}, {LIMIT}))
from gateway.command.cli import main
sys.exit(main())
"""
TIMEOUT_S = 20.0
BODY = completion_body("one two", 100)


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[Server]:
    """A gateway with few descriptors and experts of its own."""
    with gateway(text_model, ["local"], program=("-c", LIMITED)) as running:
        yield running


@contextmanager
def strangers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections over which nothing is said."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            for _ in range(count)
        ]


def ended(connections: list[socket.socket]) -> int:
    """How many the server has closed; fails if it has reset one."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            while connection.recv(4096):  # gRPC greets
                continue
            count += 1
        except BlockingIOError:
            continue
    return count


def test_http(server: Server) -> None:
    """Who is too many gets 503, and nobody is reset; what was there goes on, and streams end as
    they would. Once the strangers have gone, all are welcome.
    """
    api = server.api
    expected = api.complete("one two", 100).token_ids
    process = psutil.Process(server.process.process.pid)
    assert process.rlimit(psutil.RLIMIT_NOFILE) == (LIMIT, LIMIT)
    with closing(api.connect()) as early:
        assert _complete(early) == expected
        events = api.stream("/v1/completions", BODY)
        running = [next(events)]
        with strangers(api.port, LIMIT + 50) as others:
            poll(
                lambda: api.metrics()["moe_connections_turned_away_total"] > 0,
                timeout_s=TIMEOUT_S,
                what="a stranger is turned away",
            )
            refused = api.post("/v1/completions", BODY)
            assert (refused.status, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) > 0
            assert api.get("/health").status == 200
            assert ended(others) > 0
            assert process.num_fds() < LIMIT - DescriptorShares.of(LIMIT).grpc
            assert _complete(early) == expected
            assert tokens_of_events([*running, *events]) == expected
    poll(
        lambda: api.post("/v1/completions", BODY).status == 200,
        timeout_s=TIMEOUT_S,
        what="new connections are served",
    )
    assert server.process.stderr.count("too many connections") == 1
    assert "Too many open files" not in server.process.stderr


def _complete(connection: HTTPConnection) -> tuple[int, ...]:
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    response = connection.getresponse()
    answer: Json = json.loads(response.read())
    assert response.status == 200, answer
    return generated_of(answer["choices"][0]).token_ids


def test_grpc(server: Server) -> None:
    """The same over gRPC: a new client is told UNAVAILABLE at once, an old one is served."""
    with _channel(server) as early:
        _check_health(early)
        with strangers(server.grpc_port, LIMIT) as others:
            poll(lambda: ended(others) > 0, timeout_s=TIMEOUT_S, what="a stranger is refused")
            with _channel(server) as late, pytest.raises(grpc.RpcError) as refused:
                _check_health(late)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            _check_health(early)
            assert server.api.get("/health").status == 200
        poll(lambda: _is_served(server), timeout_s=TIMEOUT_S, what="new clients are served")


def _channel(server: Server) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    return grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options)


def _check_health(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def _is_served(server: Server) -> bool:
    with _channel(server) as channel:
        try:
            _check_health(channel)
        except grpc.RpcError:
            return False
    return True
