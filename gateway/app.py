"""What the HTTP server answers: routes, keys, errors.

One event loop runs all of it. The order of a request: id, API key, handler; an exception becomes an
error envelope in one place, and what was not expected is logged there and told to nobody.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import HttpVersion10, hdrs, web
from prometheus_client import CollectorRegistry

from expertmesh.errors import OverloadedError
from gateway.admin_handlers import PREFIX as ADMIN_PREFIX
from gateway.admin_handlers import AdminAccess, AdminHandlers
from gateway.api_keys import ApiKeys, bearer_key
from gateway.cors import Cors
from gateway.http_connections import connected_s, is_turned_away
from gateway.messages.errors import PREFIX as MESSAGES_PREFIX
from gateway.messages.errors import in_style_of
from gateway.messages.handlers import MessagesHandlers
from gateway.openai.body import BodyError
from gateway.openai.errors import ApiError, api_error, no_endpoint
from gateway.openai.handlers import CONNECTED_S, REQUEST_ID, OpenAiHandlers
from gateway.openai.tokenizer_handlers import TokenizerHandlers
from gateway.placement.operator import Operator, StaticPlacement
from gateway.responses.handlers import ResponseHandlers
from gateway.service import GenerationFrontend, new_id
from gateway.status_handlers import OPEN_PATHS, StatusHandlers, load_header
from gateway.telemetry.handlers import MoeHandlers
from gateway.telemetry.telemetry import Telemetry

_log = logging.getLogger(__name__)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Access:
    """Who may call."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    """Needed everywhere but at the paths of `OPEN_PATHS` and those of operators."""
    admin: AdminAccess = field(default_factory=AdminAccess)
    """Operators."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call from a browser; "*" allows all."""


_ANYBODY = Access()
_NO_SETTINGS: Mapping[str, object] = {}
_NOTHING_PLACED = StaticPlacement()


def build_app(
    frontend: GenerationFrontend,
    registry: CollectorRegistry,
    *,
    access: Access = _ANYBODY,
    settings: Mapping[str, object] = _NO_SETTINGS,
    operator: Operator = _NOTHING_PLACED,
    telemetry: Telemetry | None = None,
) -> web.Application:
    """The application.

    Args:
        frontend: Where answers come from.
        registry: What /metrics shows.
        access: Who may call.
        settings: What /server_info shows.
        operator: Does what operators ask.
        telemetry: What /v1/moe shows; by default there is nothing to see.
    """
    door = _Door(frontend, access)
    app = web.Application(middlewares=[door.answer], client_max_size=frontend.limits.max_body_bytes)
    app.on_response_prepare.append(door.add_headers)
    OpenAiHandlers(frontend).add_routes(app.router)
    TokenizerHandlers(frontend).add_routes(app.router)
    ResponseHandlers(frontend).add_routes(app.router)
    MessagesHandlers(frontend).add_routes(app.router)
    StatusHandlers(frontend, registry, settings).add_routes(app.router)
    AdminHandlers(operator).add_routes(app.router)
    MoeHandlers(telemetry or Telemetry(), frontend).add_to(app)
    return app


class _Door:
    """What every request passes and every response leaves by.

    Args:
        frontend: For its load.
        access: Who may call.
    """

    def __init__(self, frontend: GenerationFrontend, access: Access) -> None:
        self._frontend = frontend
        self._keys, self._admin = access.keys, access.admin
        self._cors = Cors(access.origins)

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Says whose request it is, and turns exceptions into error envelopes."""
        response = await self._answer(request, handler)
        if is_turned_away(request):
            response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.version < HttpVersion10:
            request.protocol.force_close()
            raise ConnectionResetError("HTTP/0.9 is not served")
        _give_id(request)
        request[CONNECTED_S] = connected_s(request)
        if self._cors.is_preflight(request):
            return self._cors.preflight()
        try:
            _check_welcome(request)
            self._check_key(request)
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone
        except BodyError as error:
            return await _answer_and_close(request, _error(request, error))
        except Exception as error:
            return _error(request, error).response()

    def _check_key(self, request: web.Request) -> None:
        if request.path in OPEN_PATHS:
            return
        if request.path.startswith(ADMIN_PREFIX):
            self._admin.check(request)
            return
        key = bearer_key(request.headers.get("Authorization"))
        if key is None and request.path.startswith(MESSAGES_PREFIX):
            key = request.headers.get("x-api-key")
        self._keys.check(key)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers of every response."""
        response.headers["X-Request-Id"] = _give_id(request)  # none yet: refused before the handler
        self._cors.mark(request, response)
        wanted = request.headers.get("endpoint-load-metrics-format")
        load = load_header(wanted, self._frontend.stats()) if wanted else None
        if load is not None:
            response.headers["endpoint-load-metrics"] = load
        if not self._frontend.accepting:  # the next request is to go to another gateway
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()


def _check_welcome(request: web.Request) -> None:
    """Those who look after the gateway are answered however many others there are."""
    if is_turned_away(request) and request.path not in OPEN_PATHS:
        raise OverloadedError("the gateway has as many connections as it can serve")


def _error(request: web.Request, error: Exception) -> ApiError:
    if isinstance(error, web.HTTPNotFound):
        return in_style_of(request.path, no_endpoint(request.method, request.path))
    return in_style_of(request.path, api_error(error, request[REQUEST_ID]))


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
