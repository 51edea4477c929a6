"""Direct connections: used where they can be had, gRPC elsewhere, and never in the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from attention_worker import direct_connection
from expert_worker.direct_server import DirectServer, ParsedCalls
from expertmesh import direct
from expertmesh.checkpoint import Checkpoint
from expertmesh.checksum import sealed
from expertmesh.direct import TOKEN_BYTES, read_offer
from expertmesh.errors import ExpertUnavailableError, PortError
from expertmesh.wire_encode import LENGTH, frame_of
from tests.conftest import Models
from tests.support.expert_servers import (
    entry_of,
    expert_server,
    faulty_server,
    loaded_store,
)
from tests.support.expert_work import (
    TIMEOUT_S,
    is_direct,
    local,
    remote,
    right,
    threads,
    wait_direct,
    work,
)
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture
def listening() -> Iterator[DirectServer]:
    """A server that answers any message with four bytes."""
    server = DirectServer("127.0.0.1", 0)
    server.serve(ParsedCalls(lambda received: frame_of(b"done"), 1000).answer_all)
    yield server
    server.stop()


def test_rows_of_any_number_travel_directly(checkpoint: Checkpoint) -> None:
    """Bits are those of the colocated mode; messages may be larger than what a socket takes."""
    store = loaded_store(checkpoint, "float32")
    with (
        expert_server(store, row_credits=8192) as server,
        remote(checkpoint, [entry_of(server.state, server.port)]) as there,
    ):
        wait_direct(there)
        for num_rows in (1, 8000, 3):
            todo = work(num_rows)
            assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert server.state.num_streams == 1
        assert server.state.load().calls == 3
    assert threads("direct-") == []


def test_two_dispatches_at_a_time(checkpoint: Checkpoint) -> None:
    """Replies are matched by id, whichever dispatch is waited for first."""
    store = loaded_store(checkpoint, "float32")
    with (
        expert_server(store) as server,
        remote(checkpoint, [entry_of(server.state, server.port)]) as there,
    ):
        wait_direct(there)
        todo = [work(5, seed=seed, layer=seed) for seed in range(3)]
        pending = [one.dispatch_on(there) for one in todo]
        for one, waiting in reversed(list(zip(todo, pending, strict=True))):
            assert torch.equal(one.run(local(checkpoint)), waiting.result())


def test_no_more_threads(listening: DirectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects while no thread can be started is turned away, and served later."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("direct-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with listening.offer() as ((_, offer),):
        port, token = read_offer(offer)
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", fail)
            with pytest.raises(OSError, match=r"answered|reset"):
                direct.connect("127.0.0.1", port, token, TIMEOUT_S)
        direct.connect("127.0.0.1", port, token, TIMEOUT_S).close()


def test_port_that_cannot_be_reached(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then rows travel over gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(direct_connection, "read_offer", lambda value: (port, read_offer(value)[1]))
    store = loaded_store(checkpoint, "float32")
    with (
        expert_server(store) as server,
        remote(checkpoint, [entry_of(server.state, server.port)]) as there,
    ):
        todo = work(9)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert not is_direct(there)


def test_connection_that_breaks(checkpoint: Checkpoint) -> None:
    """Its loss fails what is on its way at once, and stream and connection are opened again."""
    store = loaded_store(checkpoint, "float32")
    todo = work(4)
    with (
        faulty_server(store, right, direct=True) as server,
        remote(checkpoint, [server.entry]) as there,
    ):
        wait_direct(there)
        first = there._routes.streams[0]._direct
        assert first is not None
        first._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ExpertUnavailableError, match="expert worker faulty"):
            todo.run(there)

        def works() -> bool:
            try:
                return torch.equal(todo.run(local(checkpoint)), todo.run(there))
            except ExpertUnavailableError:
                return False

        poll(works, timeout_s=TIMEOUT_S, what="calls succeed again")
        wait_direct(there)
        assert there._routes.streams[0]._direct is not first


def test_reply_that_is_none(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no reply end the connection with a reason, not the attention worker."""
    monkeypatch.setattr(
        "tests.support.expert_servers.FaultyServer._answer_directly",
        lambda self, received: frame_of(b"\xff\xff"),
    )
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=True) as server,
        remote(checkpoint, [server.entry]) as there,
    ):
        wait_direct(there)
        with pytest.raises(ExpertUnavailableError, match="2 bytes does not match its checksum"):
            work(4).run(there)


def _connect(server: DirectServer, token: bytes) -> socket.socket:
    return direct.connect("127.0.0.1", server.port, token, TIMEOUT_S)


def test_only_streams_have_connections(listening: DirectServer) -> None:
    """A token is needed, it counts once, and its connection ends with its stream."""
    with pytest.raises(direct.DirectConnectionError, match="answered b''"):
        _connect(listening, bytes(TOKEN_BYTES))
    with listening.offer() as metadata:
        port, token = read_offer(metadata[0][1])
        assert port == listening.port
        with _connect(listening, token) as connection:
            with pytest.raises(direct.DirectConnectionError):
                _connect(listening, token)
            connection.settimeout(TIMEOUT_S)
            connection.sendall(b"".join(frame_of(sealed(b"hello"))))
            assert connection.recv(100) == LENGTH.pack(4) + b"done"
    with listening.offer() as metadata:
        _, token = read_offer(metadata[0][1])
        connection = _connect(listening, token)
    with connection:
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(100) == b""
    with pytest.raises(direct.DirectConnectionError):
        _connect(listening, token)


def test_message_that_is_too_long(listening: DirectServer) -> None:
    """It ends its connection before anything is allocated."""
    with (
        listening.offer() as metadata,
        _connect(listening, read_offer(metadata[0][1])[1]) as opened,
    ):
        opened.settimeout(TIMEOUT_S)
        opened.sendall(LENGTH.pack(2**32 - 1))
        assert opened.recv(100) == b""


def test_strangers_do_not_pile_up(listening: DirectServer) -> None:
    """Connections without a token are refused beyond a few, and do not keep others out for long."""
    strangers = [socket.create_connection(("127.0.0.1", listening.port)) for _ in range(30)]
    try:
        poll(lambda: len(threads("direct-")) <= 17, timeout_s=TIMEOUT_S, what="some are refused")
    finally:
        for stranger in strangers:
            stranger.close()

    def is_admitted() -> bool:
        with listening.offer() as metadata:
            try:
                _connect(listening, read_offer(metadata[0][1])[1]).close()
            except OSError:
                return False
        return True

    poll(is_admitted, timeout_s=TIMEOUT_S, what="a stream is admitted")


def test_port_in_use(listening: DirectServer) -> None:
    """One clear line."""
    with pytest.raises(PortError, match=f"cannot listen on 127.0.0.1:{listening.port}"):
        DirectServer("127.0.0.1", listening.port)
