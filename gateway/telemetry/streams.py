"""The overview once a second, made once for all who watch. In the thread of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from expertmesh.errors import OverloadedError
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.views import Json, overview

MAX_STREAMS = 32
INTERVAL_S = 1.0


class OverviewTicks:
    """Overviews for streams, of which there are not too many.

    Args:
        telemetry: Makes them.
        accepting: False once the gateway is about to stop; streams end then.
    """

    def __init__(self, telemetry: Telemetry, accepting: Callable[[], bool]) -> None:
        self._telemetry = telemetry
        self._accepting = accepting
        self._ended = asyncio.Event()
        self._num_streams = 0
        self._made_s = -INTERVAL_S
        self._latest: Json = {}

    @contextmanager
    def subscribed(self) -> Iterator[None]:
        """One more stream, while it is entered.

        Raises:
            OverloadedError: There are as many as there may be.
        """
        if self._num_streams >= MAX_STREAMS:
            raise OverloadedError(f"{MAX_STREAMS} streams watch already", retry_after_s=5.0)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def end(self, app: web.Application) -> None:
        """Ends all streams."""
        self._ended.set()

    async def __aiter__(self) -> AsyncIterator[Json]:
        """An overview at once, and then one each second until the gateway stops."""
        while self._accepting() and not self._ended.is_set():
            yield self._overview()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), INTERVAL_S)

    def _overview(self) -> Json:
        now_s = time.monotonic()
        if now_s - self._made_s >= INTERVAL_S / 2:
            self._latest, self._made_s = overview(self._telemetry), now_s
        return self._latest
