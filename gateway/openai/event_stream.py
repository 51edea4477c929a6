"""Server-sent events to one client.

The response starts with the first event, not before: an error that comes earlier is an ordinary
HTTP error, which clients retry. Later errors are an event of their own, followed by [DONE]: a bare
disconnect tells clients nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import orjson
from aiohttp import web

from gateway.openai.errors import ApiError
from gateway.openai.logprobs import Json

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """The answer to a streaming request.

    Args:
        request: The request.
        write_timeout_s: Longest time for which the client may take nothing.
    """

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        """True once the client got the status; errors must go into the stream."""
        return self.response.prepared

    async def send(self, events: Iterable[Json]) -> None:
        """Sends events in one write.

        Raises:
            ConnectionError: The client is gone or takes nothing.
        """
        data = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events)
        if data:
            await self._write(data)

    async def keep_alive(self) -> None:
        """Sends a comment, so that nobody on the way takes the connection for dead."""
        await self._write(b": keep-alive\n\n")

    async def fail(self, error: ApiError) -> None:
        """Sends an error as an event."""
        await self._write(b"data: %b\n\n" % error.envelope())

    async def finish(self) -> None:
        """Ends the stream."""
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None
