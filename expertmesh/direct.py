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
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from expertmesh.wire_encode import LENGTH, Parts

METADATA_KEY = "expertmesh-direct"
TOKEN_BYTES = 16
MAGIC = b"EMX1"
"""What an expert worker answers to a token that it knows."""

BUFFER_ADDRESS, BUFFER_SIZE, BUFFER_USED = 0, 1, 2
"""Words of a `FrameReader`; compiled code knows these numbers."""

_BUFFER_BYTES = 256 * 1024
_HANGS_UP = getattr(select, "POLLRDHUP", 0)  # hang-ups and errors are reported in any case
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


def is_connected(connection: socket.socket) -> bool:
    """False once an end of it was closed or shut down, whatever is still to be read."""
    poller = select.poll()
    poller.register(connection, _HANGS_UP)
    return not poller.poll(0)


def send_parts(connection: socket.socket, parts: Parts) -> None:
    """Sends a frame over a blocking connection. Raises OSError."""
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connection.sendall(memoryview(part)[sent:])
        sent = max(0, sent - len(part))


class FrameReader:
    """Frames out of what a connection received. One thread.

    Compiled code may read and take frames as well: it finds the buffer by `words`. What it leaves
    is handed out by the next `receive`, without a read if a message is complete already.

    Args:
        connection: Blocking or not.
        max_message_bytes: Longest message that is taken.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self._connection = connection
        self._max_message_bytes = max_message_bytes
        self.words: npt.NDArray[np.int64] = np.zeros(3, np.int64)
        """At `BUFFER_ADDRESS`, `BUFFER_SIZE` and `BUFFER_USED`; the buffer begins with a frame."""
        self._set_buffer(np.empty(_BUFFER_BYTES, np.uint8))

    def receive(self) -> Sequence[bytes]:
        """The messages that are complete, after one more read if none is; often none or one.

        Raises:
            DirectConnectionError: The peer closed the connection, or announced too long a message.
            BlockingIOError: There is nothing to read.
            OSError: The connection is lost.
        """
        if messages := self._take():
            return messages
        used = self._used
        count = self._connection.recv_into(self._view[used:])
        if not count:
            raise DirectConnectionError("the connection was closed")
        self.words[BUFFER_USED] = used + count
        return self._take()

    @property
    def _used(self) -> int:
        return int(self.words[BUFFER_USED])

    def _set_buffer(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._buffer, self._view = buffer, memoryview(buffer.data)
        self.words[BUFFER_ADDRESS], self.words[BUFFER_SIZE] = buffer.ctypes.data, buffer.size

    def _take(self) -> Sequence[bytes]:
        """The messages that are complete; makes room for the rest of the next."""
        used = self._used
        messages: list[bytes] = []
        at = 0
        while (end := self._end_of_frame(at, used)) and end <= used:
            messages.append(bytes(self._view[at + LENGTH.size : end]))
            at = end
        self._keep(at, used, end - at)
        return messages

    def _end_of_frame(self, at: int, used: int) -> int:
        """Where the frame at `at` ends; 0 if that is not known yet."""
        if used - at < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._view, at)
        if length > self._max_message_bytes:
            raise DirectConnectionError(
                f"a message of {length} bytes, expected at most {self._max_message_bytes}"
            )
        return at + LENGTH.size + int(length)

    def _keep(self, at: int, used: int, frame_size: int) -> None:
        """Moves the bytes from `at` to the start, and makes room for the frame that they begin."""
        begun = self._buffer[at:used]
        is_too_small = frame_size > self._buffer.size
        if is_too_small:  # by powers of two, so that it is seldom
            self._set_buffer(np.empty(2 ** (frame_size - 1).bit_length(), np.uint8))
        if at or is_too_small:
            self._buffer[: begun.size] = begun  # NumPy takes care of overlaps
        self.words[BUFFER_USED] = used - at
