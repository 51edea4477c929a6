"""Direct connections to an expert worker; see `expertmesh.direct`.

Threads: `direct-accept`, and `direct-PORT` for each connection, which reads a call, answers it, and
reads the next, here or in compiled code (`expert_worker.compiled_calls`). A connection belongs to a
Forward stream and ends with it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from expertmesh.addresses import join_address
from expertmesh.direct import (
    MAGIC,
    TOKEN_BYTES,
    DirectConnectionError,
    FrameReader,
    is_connected,
    new_token,
    offer,
    receive_exactly,
    send_parts,
    tune,
)
from expertmesh.errors import PortError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, sealed_receiver
from expertmesh.wire_encode import Parts

logger = logging.getLogger(__name__)

Answer = Callable[[Received[pb.ForwardRequest]], Parts]
AnswerAll = Callable[[socket.socket], None]
"""Answers the calls of a connection until it ends; raises OSError then."""
Metadata = tuple[tuple[str, str], ...]

_HELLO_TIMEOUT_S = 5.0
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.1  # after a failure, such as too many open files
_MAX_STRANGERS = 16  # connections that have not shown a token yet


class DirectCalls(Protocol):
    """Answers what comes over direct connections."""

    def answer_all(self, connection: socket.socket) -> None:
        """Answers the calls of a connection until it ends; raises OSError then."""

    def warm_up(self, message: bytes) -> None:
        """Answers a call as if it came over the network; counts nothing."""


class DirectOffers(Protocol):
    """Offers direct connections to Forward streams, or does not."""

    def serve(self, answer_all: AnswerAll) -> None:
        """Accepts connections from now on, and has their calls answered."""

    def offer(self) -> AbstractContextManager[Metadata]:
        """A context with the initial metadata of one stream; its connection ends with it."""

    def stop(self) -> None:
        """Ends all connections and threads."""


class NoDirectServer:
    """Offers nothing: calls come over gRPC."""

    def serve(self, answer_all: AnswerAll) -> None:
        """There is nothing to serve."""

    @contextmanager
    def offer(self) -> Iterator[Metadata]:
        """No metadata."""
        yield ()

    def stop(self) -> None:
        """There is nothing to end."""


class DirectServer:
    """Listens on a port of its own.

    Args:
        host: Address to bind.
        port: Port to bind; 0 picks a free one.

    Raises:
        PortError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = bind(host, port)
        self._listener.listen(_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: dict[bytes, socket.socket | None] = {}  # of open streams, by token
        self._strangers: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._stopped = threading.Event()

    def serve(self, answer_all: AnswerAll) -> None:
        """Accepts connections from now on, and has their calls answered."""
        accept = threading.Thread(target=self._accept, args=(answer_all,), name="direct-accept")
        self._start(accept)

    @contextmanager
    def offer(self) -> Iterator[Metadata]:
        """The metadata of a Forward stream that is open until the context ends."""
        token = new_token()
        with self._lock:
            self._connections[token] = None
        try:
            yield (offer(self.port, token),)
        finally:
            with self._lock:
                connection = self._connections.pop(token)
            if connection is not None:
                _hang_up(connection)

    def stop(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._stopped.set()
            open_now = [*filter(None, self._connections.values()), *self._strangers]
            threads = list(self._threads)
        _hang_up(self._listener)
        for connection in open_now:
            _hang_up(connection)
        for thread in threads:
            thread.join(2.0)
        self._listener.close()

    def _start(self, thread: threading.Thread) -> None:
        thread.daemon = True
        with self._lock:
            self._threads = {known for known in self._threads if known.is_alive()}
            thread.start()
            self._threads.add(thread)

    def _accept(self, answer_all: AnswerAll) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._stopped.wait(_ACCEPT_PAUSE_S):
                    logger.warning("a direct connection was not accepted: %s", error)
                continue
            with self._lock:
                is_welcome = len(self._strangers) < _MAX_STRANGERS and not self._stopped.is_set()
                if is_welcome:
                    self._strangers.add(connection)
            if not is_welcome:
                connection.close()
                continue
            name = f"direct-{connection.fileno()}"
            arguments = connection, answer_all
            try:
                self._start(threading.Thread(target=self._run, args=arguments, name=name))
            except RuntimeError as error:  # too many threads
                logger.warning("a direct connection was not accepted: %s", error)
                self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(connection)
        connection.close()
        self._stopped.wait(_ACCEPT_PAUSE_S)

    def _run(self, connection: socket.socket, answer_all: AnswerAll) -> None:
        with connection:
            try:
                tune(connection)
                if self._admit(connection):
                    answer_all(connection)
            except DirectConnectionError as error:
                logger.debug("a direct connection ended: %s", error)
            except OSError as error:
                logger.info("a direct connection was lost: %s", error)
            except MemoryError:
                logger.exception("a direct connection failed; calls come over its stream")

    def _admit(self, connection: socket.socket) -> bool:
        """True if it shows the token of a stream that is open and has no other connection."""
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            token = receive_exactly(connection, TOKEN_BYTES)
        finally:
            with self._lock:
                self._strangers.discard(connection)
        with self._lock:
            if self._stopped.is_set() or self._connections.get(token, connection) is not None:
                return False
            self._connections[token] = connection
        connection.settimeout(None)
        connection.sendall(MAGIC)
        return True


class ParsedCalls:
    """Answers calls of connections in Python, each in the thread that calls `answer_all`.

    Args:
        answer: Answers a call.
        max_message_bytes: Longest call.
    """

    def __init__(self, answer: Answer, max_message_bytes: int) -> None:
        self._answer = answer
        self._max_message_bytes = max_message_bytes
        self._parse = sealed_receiver(pb.ForwardRequest)

    def warm_up(self, message: bytes) -> None:
        """There is nothing that others have not warmed up."""

    def answer_all(self, connection: socket.socket) -> None:
        """Answers calls in order until the connection ends.

        Raises:
            DirectConnectionError: The peer closed it, or announced too long a message.
            OSError: It is lost.
        """
        reader = FrameReader(connection, self._max_message_bytes)
        while True:
            for message in reader.receive():
                received = self._parse(message)
                wanted = replace(received, is_wanted=lambda: is_connected(connection))
                send_parts(connection, self._answer(wanted))
                check_framing(received)


def check_framing(received: Received[pb.ForwardRequest]) -> None:
    """Looks whether the next message can be found.

    Raises:
        DirectConnectionError: Nothing is left of this one, and perhaps its length was changed.
    """
    if received.message is None and not received.is_intact:
        raise DirectConnectionError(received.error)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has an address.

    Raises:
        PortError: The address cannot be bound.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise port_error(host, port, error.strerror or str(error)) from error
    return bound


def port_error(host: str, port: int, reason: str) -> PortError:
    """The error for an address that cannot be bound."""
    return PortError(
        f"cannot listen on {join_address(host, port)}: {reason}",
        fix="choose another --host or --port",
    )


def _hang_up(connection: socket.socket) -> None:
    """Ends a connection that another thread reads, which then closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already
