"""Direct connections: Forward messages over a plain TCP connection beside a Forward stream.

A Forward stream over gRPC passes through four threads on each side; a connection that the waiting
thread reads itself passes through none. An expert worker that offers one says so in the initial
metadata of the Forward stream, as `port token`; the attention worker connects to that port of the
same host, sends the token, and from then on both send frames (see `expertmesh.wire_encode`). The
stream stays open: when it ends, so does the connection, and the other way round. Whoever does not
connect, or cannot, goes on over the stream.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack

from expertmesh.wire_encode import LENGTH, Parts

METADATA_KEY = "expertmesh-direct"
TOKEN_BYTES = 16
MAGIC = b"EMX1"
"""What an expert worker answers to a token that it knows."""

_BUFFER_BYTES = 256 * 1024
_SEND_TIMEOUT_S = 30  # of a peer that takes nothing while we wait
_UNACKNOWLEDGED_MS = 5000  # until a connection to a machine that is gone counts as lost
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))


class DirectConnectionError(ConnectionError):
    """A direct connection ended, or its peer does not keep to the protocol."""


def new_token() -> bytes:
    """What connects a connection with its stream; nobody can guess it."""
    return secrets.token_bytes(TOKEN_BYTES)


def offer(port: int, token: bytes) -> tuple[str, str]:
    """The metadata of a Forward stream that offers a direct connection."""
    return METADATA_KEY, f"{port} {token.hex()}"


def read_offer(value: str) -> tuple[int, bytes]:
    """Port and token of an offer.

    Raises:
        DirectConnectionError: It is none.
    """
    port, _, token = value.partition(" ")
    try:
        found = int(port), bytes.fromhex(token)
    except ValueError as error:
        raise DirectConnectionError(f"{METADATA_KEY} is {value[:80]!r}") from error
    if not 1 <= found[0] <= 65_535 or len(found[1]) != TOKEN_BYTES:
        raise DirectConnectionError(f"{METADATA_KEY} is {value[:80]!r}")
    return found


def connect(host: str, port: int, token: bytes, timeout_s: float) -> socket.socket:
    """A connection that was accepted, not blocking.

    Raises:
        OSError: There is none; `DirectConnectionError` if the other end knows no such token.
    """
    with ExitStack() as on_failure:
        opened = on_failure.enter_context(socket.create_connection((host, port), timeout_s))
        tune(opened)
        opened.sendall(token)
        answer = receive_exactly(opened, len(MAGIC))
        if answer != MAGIC:
            raise DirectConnectionError(f"port {port} answered {answer!r}, expected {MAGIC!r}")
        opened.setblocking(False)
        on_failure.pop_all()
        return opened


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer at the end of the connection. Raises OSError."""
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def tune(connection: socket.socket) -> None:
    """No waiting for more to send; the end of a machine is noticed, and who takes nothing too."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit = struct.pack("ll", _SEND_TIMEOUT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS)):
        if option := getattr(socket, name, None):  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send_parts(connection: socket.socket, parts: Parts) -> None:
    """Sends a frame over a blocking connection. Raises OSError."""
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connection.sendall(memoryview(part)[sent:])
        sent = max(0, sent - len(part))


class FrameReader:
    """Frames out of what a connection received. One thread.

    Args:
        connection: Blocking or not.
        max_message_bytes: Longest message that is taken.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self._connection = connection
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._used = 0

    def receive(self) -> Sequence[bytes]:
        """The messages that are complete after one more read, often none or one.

        Raises:
            DirectConnectionError: The peer closed the connection, or announced too long a message.
            BlockingIOError: There is nothing to read.
            OSError: The connection is lost.
        """
        count = self._connection.recv_into(memoryview(self._buffer)[self._used :])
        if not count:
            raise DirectConnectionError("the connection was closed")
        self._used += count
        messages: list[bytes] = []
        at = 0
        while (end := self._end_of_frame(at)) and end <= self._used:
            messages.append(bytes(memoryview(self._buffer)[at + LENGTH.size : end]))
            at = end
        self._keep_from(at, end)
        return messages

    def _end_of_frame(self, at: int) -> int:
        """Where the frame at `at` ends; 0 if that is not known yet."""
        if self._used - at < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._buffer, at)
        if length > self._max_message_bytes:
            raise DirectConnectionError(
                f"a message of {length} bytes, expected at most {self._max_message_bytes}"
            )
        return at + LENGTH.size + int(length)

    def _keep_from(self, at: int, end: int) -> None:
        """Moves an incomplete frame to the start, and makes room for all of it."""
        if end - at > len(self._buffer):
            larger = bytearray(end - at)
            larger[: self._used - at] = memoryview(self._buffer)[at : self._used]
            self._buffer = larger
        elif at and at < self._used:
            self._buffer[: self._used - at] = self._buffer[at : self._used]
        self._used -= at
