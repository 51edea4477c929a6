"""Starting and stopping leaves nothing behind: no process, no port, no temporary socket."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.support.api import completion_body
from tests.support.mesh import (
    COMMAND,
    STOP_TIMEOUT_S,
    Server,
    assert_gone,
    gateway,
    start_expert_worker,
    start_server,
    wait_ready,
)
from tests.support.processes import Managed, free_port, poll, port_is_free, processes_of

pytestmark = pytest.mark.alone


def _listening(process: Managed) -> list[int]:
    """TCP ports that the tree listens on."""
    ports = {
        connection.laddr.port
        for member in processes_of(process.marker)
        for connection in member.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(ports)


@pytest.mark.parametrize(
    "sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_serve_stops_within_five_seconds(text_model: Path, sign: signal.Signals) -> None:
    """`--ask` streams an answer; then come URLs, model, processes and covered experts. After Ctrl-C
    or SIGTERM, with requests running: exit code 0 in 5 s, no orphan, no held port."""
    flags = ["--expert-workers", "2", "--dtype", "float32", "--ask", "Who are you?"]
    server = start_server(["serve", str(text_model), *flags], name="serve")
    with server.process as process:
        wait_ready(server.api)
        _check_what_is_shown(server, text_model.name)
        ports = _listening(process)
        assert set(server.ports) < set(ports)
        seen = threading.Event()

        def read() -> None:
            try:
                for _ in server.api.stream("/v1/completions", completion_body("go", 450)):
                    seen.set()
            except (OSError, AssertionError):
                seen.set()  # the stream may be cut off: what is tested is the stop

        reader = threading.Thread(target=read, name="reader")
        reader.start()
        assert seen.wait(20)
        started = time.monotonic()
        assert process.stop(STOP_TIMEOUT_S, sign=sign) == 0, process.stderr
        assert_gone(process, ports, timeout_s=max(0.0, STOP_TIMEOUT_S + started - time.monotonic()))
        reader.join(10)
        assert "Traceback" not in process.stderr


def _check_what_is_shown(server: Server, model: str) -> None:
    port, grpc_port = server.ports
    shown = server.process.stdout
    for part in (
        "Who are you?",
        f"http://127.0.0.1:{port}/v1",
        f"127.0.0.1:{grpc_port}",
        f"http://127.0.0.1:{port}/metrics",
        model,
        "24/24",
    ):
        assert part in shown
    assert shown.index("Who are you?") < shown.index("24/24")
    children = len(server.process.descendants())
    assert children == 4, "gateway, attention worker, 2 expert workers"


def test_stop_while_starting(text_model: Path) -> None:
    """Ctrl-C before anything is ready stops everything as quickly."""
    arguments = ["serve", str(text_model), "--port", "0", "--grpc-port", "0"]
    with Managed([*COMMAND, *arguments], name="serve") as process:
        poll(lambda: len(process.descendants()) >= 2, timeout_s=20, what="children are started")
        assert process.stop(STOP_TIMEOUT_S, sign=signal.SIGINT) == 0
        assert_gone(process, [])
        assert "Traceback" not in process.stderr


def test_kill_of_serve_leaves_no_orphan(text_model: Path) -> None:
    """kill -9 of `serve` itself: every child notices and ends within seconds."""
    server = start_server(["serve", str(text_model), "--dtype", "float32"], name="serve")
    with server.process as process:
        ports = _listening(process)
        assert len(process.descendants()) >= 4
        process.kill()
        assert_gone(process, ports, timeout_s=8)


def test_kill_of_a_gateway_ends_its_attention_worker(text_model: Path) -> None:
    """kill -9 of a gateway ends its attention worker, and leaves the expert workers alone."""
    worker = start_expert_worker(text_model)
    with worker.process:
        server = start_server(
            ["gateway", str(text_model), "--experts", worker.address], name="gateway"
        )
        with server.process as process:
            poll(lambda: len(process.descendants()) == 1, timeout_s=10, what="one attention worker")
            process.kill()
            assert_gone(process, server.ports, timeout_s=8)
        assert worker.state().load.errors == 0
        assert worker.process.stop(STOP_TIMEOUT_S) == 0


@pytest.mark.slow
def test_gateway_survives_its_attention_worker(text_model: Path) -> None:
    """kill -9 of the attention worker: the gateway starts another one and serves again."""
    worker = start_expert_worker(text_model, dtype="float32")
    with worker.process, gateway(text_model, [worker.address]) as server:
        before = server.api.complete("one two", 16)
        (attention_worker,) = server.process.descendants()
        attention_worker.kill()
        psutil.wait_procs([attention_worker], timeout=5)

        def serves() -> bool:
            answer = server.api.post("/v1/completions", completion_body("one two", 1))
            return answer.status == 200

        poll(serves, timeout_s=40, what="requests are served again")
        assert before == server.api.complete("one two", 16)


@pytest.mark.slow
def test_ports_can_be_used_again_at_once(text_model: Path) -> None:
    """Three starts and stops on the same fixed ports, each one serving."""
    port, grpc_port = free_port(), free_port()
    for _ in range(3):
        flags = ("--port", str(port), "--grpc-port", str(grpc_port), "--experts", "local")
        with Managed([*COMMAND, "serve", str(text_model), *flags], name="serve") as process:
            info = process.ready()
            assert (info["http_port"], info["grpc_port"]) == (port, grpc_port)
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                assert process.stop(STOP_TIMEOUT_S) == 0, process.stderr
            assert port_is_free(port)
            assert port_is_free(grpc_port)
