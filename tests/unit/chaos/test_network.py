"""The network of the chaos suite carries bytes, and does to them what it is told to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from expertmesh.direct import MAGIC, TOKEN_BYTES
from expertmesh.wire_encode import LENGTH
from tests.chaos.harness.network import NEAR, Network
from tests.chaos.harness.pool import HOST, PoolWorker

TIMEOUT_S = 10.0
SHORT_S = 0.2


class _Echo:
    """Takes a token, greets and returns every byte, on the port of direct connections."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server((HOST, port))
        self._threads = [threading.Thread(target=self._accept, name="echo", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="echo")
            self._threads.append(thread)
            thread.start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
                connection.sendall(MAGIC)
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        """Ends all."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@pytest.fixture
def worker() -> PoolWorker:
    """Only its ports matter."""
    return PoolWorker(Path("nowhere"), "none")


@pytest.fixture
def network(worker: PoolWorker) -> Iterator[Network]:
    """With an echo at the far end."""
    with closing(_Echo(worker.direct_port)), Network([worker]) as running:
        yield running


@pytest.fixture
def connection(network: Network, worker: PoolWorker) -> Iterator[socket.socket]:
    """Through the network, greeted."""
    with _greeted(worker) as opened:
        yield opened


@contextmanager
def _greeted(worker: PoolWorker) -> Iterator[socket.socket]:
    with socket.create_connection((NEAR, worker.direct_port), TIMEOUT_S) as opened:
        opened.sendall(bytes(TOKEN_BYTES))
        assert _receive(opened, len(MAGIC)) == MAGIC
        yield opened


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "the connection was closed"
        data += more
    return data


def _receive_until_reset(connection: socket.socket) -> bytes:
    data = b""
    try:
        while True:
            data += _receive(connection, 1)
    except ConnectionResetError:
        return data


def _frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def test_carries_all(connection: socket.socket) -> None:
    """Without a fault, bytes come back as they are."""
    sent = _frame(bytes(range(256)) * 1000) + _frame(b"")
    connection.sendall(sent)
    assert _receive(connection, len(sent)) == sent


def test_cut_and_mended(network: Network, worker: PoolWorker, connection: socket.socket) -> None:
    """Nothing comes while it is cut, and nothing is lost."""
    with network.lines[worker].under(is_cut=True):
        connection.sendall(_frame(b"one"))
        connection.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    connection.settimeout(TIMEOUT_S)
    assert _receive(connection, 7) == _frame(b"one")


def test_reset(network: Network, worker: PoolWorker, connection: socket.socket) -> None:
    """Open connections are reset; new ones are carried."""
    network.reset(worker)
    with pytest.raises(ConnectionResetError):
        connection.recv(1)
    with _greeted(worker):
        pass


def test_lost_within_a_reply(
    network: Network, worker: PoolWorker, connection: socket.socket
) -> None:
    """So many bytes of replies pass before the reset."""
    with network.lines[worker].under(reply_bytes_left=5):
        connection.sendall(_frame(b"abcdefgh"))
        received = _receive_until_reset(connection)
    assert _frame(b"abcdefgh")[:5].startswith(received)


def test_replies_are_changed(
    network: Network, worker: PoolWorker, connection: socket.socket
) -> None:
    """Whole messages, however they were cut into pieces."""
    with network.lines[worker].under(reply_fault=lambda reply: [reply.upper(), b""]):
        for byte in _frame(b"abc"):
            connection.sendall(bytes([byte]))
        assert _receive(connection, 11) == _frame(b"ABC") + _frame(b"")


def test_requests_are_changed(
    network: Network, worker: PoolWorker, connection: socket.socket
) -> None:
    """Whole messages behind the token, however they were cut into pieces."""
    with network.lines[worker].under(request_fault=lambda call: [b"x", call.upper()]):
        for byte in _frame(b"abc"):
            connection.sendall(bytes([byte]))
        assert _receive(connection, 12) == _frame(b"x") + _frame(b"ABC")
