"""The HTTP server: routes, errors, health, metrics, and limits on what a connection may do.

One event loop runs all of it. The order of a request: id, error envelope, handler; an exception
becomes an envelope in one place, and what was not expected is logged there and told to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.web_protocol import RequestHandler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from expertmesh import PROTOCOL_REVISION, __version__
from gateway.openai.body import BodyError
from gateway.openai.errors import ApiError, api_error
from gateway.openai.handlers import REQUEST_ID, OpenAiHandlers, json_response
from gateway.openai.logprobs import Json
from gateway.service import ApiLimits, GenerationFrontend, new_id

_log = logging.getLogger(__name__)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

Encoder = Callable[[CollectorRegistry], bytes]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(frontend: GenerationFrontend, registry: CollectorRegistry) -> web.Application:
    """The application.

    Args:
        frontend: Where answers come from.
        registry: What /metrics shows.
    """
    app = web.Application(
        middlewares=[_answer_errors], client_max_size=frontend.limits.max_body_bytes
    )
    app.on_response_prepare.append(_echo_request_id)
    OpenAiHandlers(frontend).add_routes(app.router)
    _StatusHandlers(frontend, registry).add_routes(app.router)
    return app


def make_runner(app: web.Application, limits: ApiLimits, *, stop_s: float = 5.0) -> web.AppRunner:
    """A runner that cancels handlers whose client is gone, and closes idle connections.

    Args:
        app: The application.
        limits: Times that a connection may take.
        stop_s: Longest time that `cleanup` waits for running requests.
    """
    return _Runner(
        app,
        limits=limits,
        handler_cancellation=True,
        keepalive_timeout=limits.idle_timeout_s,
        shutdown_timeout=stop_s,
        lingering_time=1.0,
        auto_decompress=False,  # encoded bodies are refused, not unpacked
        access_log=None,
    )


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id, and turns exceptions into error envelopes."""
    if request.version < HttpVersion10:
        request.protocol.force_close()
        raise ConnectionResetError("HTTP/0.9 is not served")
    _give_id(request)
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client is gone
    except BodyError as error:
        return await _answer_and_close(request, api_error(error, request[REQUEST_ID]))
    except Exception as error:
        return api_error(error, request[REQUEST_ID]).response()


def _give_id(request: web.BaseRequest) -> str:
    """The id of a request, the same at every call; the client's own if that is sane."""
    if REQUEST_ID not in request:
        wanted = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = wanted if _SANE_REQUEST_ID.fullmatch(wanted) else new_id("req-")
    return request[REQUEST_ID]


async def _answer_and_close(request: web.Request, error: ApiError) -> web.StreamResponse:
    """Answers and closes the connection, as the rest of the body is not read."""
    response = error.response()
    response.force_close()
    await response.prepare(request)
    await response.write_eof()
    request.protocol.force_close()
    return response


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = _give_id(request)  # none yet: refused before the handler


class _StatusHandlers:
    """Endpoints for orchestrators and for people who look after the server."""

    def __init__(self, frontend: GenerationFrontend, registry: CollectorRegistry) -> None:
        self._frontend = frontend
        self._registry = registry

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints outside /v1."""
        router.add_get("/health", self.health)
        router.add_get("/ready", self.ready)
        router.add_get("/version", self.version)
        router.add_get("/metrics", self.metrics)

    async def health(self, request: web.Request) -> web.Response:
        """200 unless only a restart can help."""
        return web.Response(status=200 if self._frontend.alive else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a request can be served now; says what is missing in any case."""
        report = ready_report(self._frontend)
        return json_response(report, status=200 if report["ready"] else 503)

    async def version(self, request: web.Request) -> web.Response:
        """Versions of the product and of the wire protocol."""
        return json_response({"version": __version__, "protocol_revision": PROTOCOL_REVISION})

    async def metrics(self, request: web.Request) -> web.Response:
        """All metrics; encoded in a thread, as that can take tens of milliseconds."""
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        body = await asyncio.to_thread(encode, self._registry)
        return web.Response(body=body, headers={"Content-Type": content_type})


def _encoder(accept: str) -> tuple[Encoder, str]:
    """What writes metrics as the client wants them, or plainly if that cannot be understood."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder("")


def ready_report(frontend: GenerationFrontend) -> Json:
    """Body of /ready."""
    mesh = frontend.mesh()
    return {
        "ready": frontend.ready,
        "message": mesh.message if frontend.accepting else "the gateway is stopping",
        "epoch": mesh.epoch,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "address": worker.address,
                "state": str(worker.state),
                "message": worker.message,
                "num_experts": worker.num_experts,
            }
            for worker in mesh.workers
        ],
        "uncovered": {str(layer): list(experts) for layer, experts in mesh.uncovered.items()},
    }


class _Runner(web.AppRunner):
    """Serves an application with connections of our own kind."""

    def __init__(self, app: web.Application, *, limits: ApiLimits, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        kwargs = {
            key: value for key, value in self._kwargs.items() if key != "handler_cancellation"
        }
        return _Server(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=True,
            header_timeout_s=self._limits.header_timeout_s,
            **kwargs,
        )


class _Server(web.Server):
    """Makes the connections."""

    def __init__(self, *args: Any, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s

    def __call__(self) -> RequestHandler:
        return _Connection(
            self, loop=self._loop, header_timeout_s=self._header_timeout_s, **self._kwargs
        )


class _Connection(RequestHandler):
    """A connection that must send a request soon, and gets envelopes for what is not HTTP."""

    __slots__ = ("_header_timeout_s", "_header_timer")

    def __init__(self, *args: Any, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
