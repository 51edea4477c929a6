"""The attention worker's end of a direct connection; see `expertmesh.direct`.

Owner: an expert stream, under its lock, or an exchange, while the stream lets it. Nothing here
waits but `open_direct`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from expertmesh.addresses import split_address
from expertmesh.direct import METADATA_KEY, FrameReader, connect, read_offer
from expertmesh.wire_encode import RequestFrame

_CONNECT_TIMEOUT_S = 0.5


class DirectConnection:
    """Frames in both directions over one socket that never blocks.

    Its descriptor stays ours until nobody refers to it: compiled code may be using it.

    Args:
        connection: Open and accepted.
        max_message_bytes: Longest reply.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self._socket = connection
        self._reader = FrameReader(connection, max_message_bytes)
        self._unsent: deque[memoryview] = deque()  # bounded: row credits bound what is in flight
        weakref.finalize(self, connection.close)

    @property
    def descriptor(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    @property
    def reader_words(self) -> npt.NDArray[np.int64]:
        """Where compiled code finds what was received; see `FrameReader`."""
        return self._reader.words

    @property
    def has_unsent(self) -> bool:
        """True if the socket has not taken all frames yet."""
        return bool(self._unsent)

    @property
    def interest(self) -> tuple[int, int]:
        """Descriptor, and the events of poll that matter now."""
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, frame: RequestFrame) -> None:
        """Sends what the socket takes at once; `flush` sends the rest. Raises OSError."""
        self.send_later(frame.framed)
        self.flush()

    def send_later(self, data: memoryview) -> None:
        """Leaves a frame, or the rest of one, to `flush`."""
        self._unsent.append(data)

    def flush(self) -> None:
        """Sends more of what is left. Raises OSError."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return

    def receive(self) -> Sequence[bytes]:
        """Messages that are there. Raises OSError; `DirectConnectionError` at the end."""
        try:
            return self._reader.receive()
        except BlockingIOError:
            return ()

    def close(self) -> None:
        """Ends it; the peer notices, and so does who waits for it."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)


def open_direct(
    address: str, metadata: Iterable[tuple[str, str | bytes]], max_message_bytes: int
) -> DirectConnection | None:
    """The connection that an expert worker offers; None if it does not.

    Args:
        address: host:port of its ExpertService.
        metadata: Initial metadata of a Forward stream.
        max_message_bytes: Longest reply.

    Raises:
        OSError: It offers one that cannot be had.
    """
    offers = [value for key, value in metadata if key == METADATA_KEY]
    if not offers:
        return None
    port, token = read_offer(str(offers[0]))
    host, _ = split_address("address", address)
    return DirectConnection(connect(host, port, token, _CONNECT_TIMEOUT_S), max_message_bytes)
