"""Connections of the HTTP server: how long they may be silent, and what is no HTTP at all.

All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.openai.errors import ApiError
from gateway.service import ApiLimits

_log = logging.getLogger(__name__)


def make_runner(app: web.Application, limits: ApiLimits, *, stop_s: float = 5.0) -> HttpRunner:
    """A runner that cancels handlers whose client is gone, and closes idle connections.

    Args:
        app: The application.
        limits: Times that a connection may take.
        stop_s: Longest time that `cleanup` waits for running requests.
    """
    return HttpRunner(
        app,
        limits=limits,
        handler_cancellation=True,
        keepalive_timeout=limits.idle_timeout_s,
        shutdown_timeout=stop_s,
        lingering_time=1.0,
        auto_decompress=False,  # encoded bodies are refused, not unpacked
        access_log=None,
    )


class HttpRunner(web.AppRunner):
    """Serves an application with connections of our own kind."""

    def __init__(self, app: web.Application, *, limits: ApiLimits, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        kwargs = {
            key: value for key, value in self._kwargs.items() if key != "handler_cancellation"
        }
        return HttpServer(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=True,
            header_timeout_s=self._limits.header_timeout_s,
            **kwargs,
        )


class HttpServer(web.Server):
    """Makes the connections."""

    def __init__(self, *args: Any, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.header_timeout_s = header_timeout_s

    def __call__(self, *, turned_away: bool = False) -> RequestHandler:
        return HttpConnection(
            self,
            loop=self._loop,
            header_timeout_s=self.header_timeout_s,
            turned_away=turned_away,
            **self._kwargs,
        )


class HttpConnection(RequestHandler):
    """A connection that must send a request soon, and gets envelopes for what is not HTTP.

    Args:
        header_timeout_s: From its beginning to the end of its first request's header.
        turned_away: There are too many: it is answered once, by an error unless it asks how the
            gateway is.

    Attributes:
        connected_s: When it began, on the monotonic clock.
    """

    __slots__ = ("_header_timeout_s", "_header_timer", "connected_s", "turned_away")

    def __init__(
        self, *args: Any, header_timeout_s: float, turned_away: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.connected_s = time.monotonic()
        self.turned_away = turned_away
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the clock for the first header."""
        super().connection_made(transport)
        self._header_timer = self._loop.call_later(self._header_timeout_s, self._check_header)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stops the clock."""
        if self._header_timer is not None:
            self._header_timer.cancel()
        super().connection_lost(exc)

    def _check_header(self) -> None:
        if self._request_count == 0:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what never became a request of the application."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone, which is no failure of ours
        if status >= 500:
            _log.error("a request failed outside the application", exc_info=exc)
            error = ApiError(500, "server_error", "internal error", "internal_error")
        else:
            _log.debug("not a valid HTTP request: %s", exc)
            text = "the request is not valid HTTP"
            error = ApiError(status, "invalid_request_error", text, "bad_request")
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        response = error.response()
        response.force_close()
        return response


def is_turned_away(request: web.BaseRequest) -> bool:
    """True if the request came over a connection too many."""
    connection = request.protocol
    return isinstance(connection, HttpConnection) and connection.turned_away


def connected_s(request: web.BaseRequest) -> float:
    """When the client of a request connected, on the monotonic clock."""
    connection = request.protocol
    assert isinstance(connection, HttpConnection), "our servers make no others"
    return connection.connected_s
