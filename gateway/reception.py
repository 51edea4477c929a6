"""Accepts connections of HTTP clients, and keeps descriptors for everything else.

An event loop that accepts connections by itself goes on until no descriptor is left, and then
closes clients at once (uvloop) or leaves them waiting (asyncio). Here a connection that takes a
descriptor of the gateway's own share is *turned away*: its request is answered 503, and it ends.
Nothing has to be counted for that. The system gives out the lowest number that is free, so that
connections with numbers below a bound are never more than that, whoever else opens what.

Of those that are turned away only some are there at a time. The oldest one goes first: it has had
the most time to send a request.

All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from gateway.descriptor_shares import DescriptorShares
from gateway.http_connections import HttpRunner, HttpServer

logger = logging.getLogger("gateway")

_PAUSE_S = 0.1
"""Until it is looked again for a descriptor, where not even one of those is there."""
_BURST_S = 60.0
"""So long without a connection too many, and the next one is worth a line in the log."""


def turned_away_counter(registry: CollectorRegistry) -> Counter:
    """Counts who got no place."""
    return Counter(
        "moe_connections_turned_away",
        "HTTP connections that were answered 503, as there were too many",
        registry=registry,
    )


class Reception(web.BaseSite):
    """Where HTTP clients come in.

    Args:
        runner: Serves them; it is set up.
        listening: A bound socket; it is closed at the end.
        registry: Where the metric is registered.
        ssl_context: For TLS.
        shares: Says which descriptors are for clients; asked for each of them.
    """

    def __init__(
        self,
        runner: HttpRunner,
        listening: socket.socket,
        registry: CollectorRegistry,
        *,
        ssl_context: ssl.SSLContext | None = None,
        shares: Callable[[], DescriptorShares] = DescriptorShares.now,
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        assert isinstance(runner.server, HttpServer)
        self._http = runner.server
        self._handshake_timeout_s = self._http.header_timeout_s if ssl_context else None
        self._listening = listening
        self._shares = shares
        self._loop = asyncio.get_running_loop()
        self._greetings: dict[asyncio.Task[None], socket.socket] = {}
        self._turned_away: deque[socket.socket] = deque()
        self._next_look: asyncio.TimerHandle | None = None
        self._burst_ends_s = 0.0
        self._count = turned_away_counter(registry)

    @property
    def name(self) -> str:
        """The address."""
        host, port, *_ = self._listening.getsockname()
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Accepts from now on.

        Raises:
            OSError: The port was taken since it was bound.
        """
        await super().start()
        self._listening.listen(self._backlog)
        self._look()

    async def stop(self) -> None:
        """Accepts no more; connections go on."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in self._greetings.values():
            _hang_up(connection)
        await asyncio.gather(*self._greetings)
        await super().stop()

    def _look(self) -> None:
        self._next_look = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Somebody has connected; called again as long as others have."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left, or no memory
            self._tell(str(error))
            if not self._dismiss_oldest():
                self._loop.remove_reader(self._listening)
                self._next_look = self._loop.call_later(_PAUSE_S, self._look)
            return
        connection.setblocking(False)
        shares = self._shares()
        turned_away = connection.fileno() >= shares.below
        if turned_away:
            self._turn_away(connection, shares)
        greeting = self._loop.create_task(self._greet(connection, turned_away=turned_away))
        self._greetings[greeting] = connection
        greeting.add_done_callback(self._greetings.pop)

    async def _greet(self, connection: socket.socket, *, turned_away: bool) -> None:
        """From an accepted connection to one that is served, over a handshake of TLS."""
        try:
            await self._loop.connect_accepted_socket(
                partial(self._http, turned_away=turned_away),
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except OSError as error:
            logger.debug("a connection ended before it was one: %s", error)

    def _turn_away(self, connection: socket.socket, shares: DescriptorShares) -> None:
        self._tell(f"HTTP clients have all descriptors below {shares.below}")
        self._count.inc()
        self._turned_away = deque(each for each in self._turned_away if each.fileno() >= 0)
        if len(self._turned_away) >= shares.turned_away:
            self._dismiss_oldest()
        self._turned_away.append(connection)

    def _dismiss_oldest(self) -> bool:
        """Ends a connection that was turned away; False if there is none."""
        while self._turned_away:
            oldest = self._turned_away.popleft()
            if oldest.fileno() >= 0:
                _hang_up(oldest)
                return True
        return False

    def _tell(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._burst_ends_s:
            logger.warning("too many connections, new ones are answered 503: %s", why)
        self._burst_ends_s = now_s + _BURST_S


def _hang_up(connection: socket.socket) -> None:
    """Ends a connection that the event loop reads, which then closes it."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
