"""Exceptions to the error envelope of the OpenAI API: status, type, code, headers.

The texts are ours; nothing of an unexpected exception reaches a client.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import orjson
from aiohttp import web

from expertmesh.errors import (
    AuthenticationError,
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    ModelNotFoundError,
    OverloadedError,
    PeerError,
    QuarantineError,
    RequestError,
)
from gateway.generation_options import shown
from gateway.openai.body import BodyError
from gateway.placement.operator import PlacementRefusedError, UnknownWorkerError

_log = logging.getLogger(__name__)

_MAX_MESSAGE_LEN = 1500
_UNAVAILABLE_RETRY_S = 2.0
"""A lost expert worker is usually back or replaced within seconds."""


class AbortedError(Exception):
    """A request was ended by an operator or by the stop of the gateway."""


@dataclass(frozen=True)
class ApiError:
    """One error, as a client sees it."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """What the client is told, fit to be sent."""
        message = self.message
        if len(message) > _MAX_MESSAGE_LEN:
            message = f"{message[:_MAX_MESSAGE_LEN]}..."
        return {
            "message": _printable(message),
            "type": self.type,
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }

    def envelope(self) -> bytes:
        """The JSON body."""
        return orjson.dumps({"error": self.fields()})

    def response(self) -> web.Response:
        """The whole answer."""
        response = web.Response(
            status=self.status,
            body=self.envelope(),
            content_type="application/json",
            headers=self.headers,
        )
        if self.status in (408, 413, 415):
            response.force_close()  # the body of the request was not read
        return response


def _printable(text: str) -> str:
    """Halves of surrogate pairs, which a body may have in its keys, cannot be sent."""
    return text.encode(errors="replace").decode()


def no_endpoint(method: str, path: str) -> ApiError:
    """Names what was asked for: the usual fault is a base URL with or without its `/v1`."""
    asked = shown(f"{method} {path}"[:60])
    message = f"no such endpoint: {asked}; the APIs are below /v1"
    return ApiError(404, "not_found_error", message, "not_found")


def api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told about an exception; unexpected ones are logged."""
    match error:
        case ModelNotFoundError():
            return ApiError(404, "not_found_error", error.message, error.code, error.param)
        case RequestError():
            return ApiError(400, "invalid_request_error", error.message, error.code, error.param)
        case BodyError():
            return ApiError(error.status, "invalid_request_error", str(error), error.code)
        case AuthenticationError():
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(
                401, "authentication_error", str(error), "invalid_api_key", headers=headers
            )
        case UnknownWorkerError():
            return ApiError(404, "not_found_error", str(error), "worker_not_found")
        case PlacementRefusedError():
            return ApiError(409, "conflict_error", str(error), "placement_refused")
        case DeadlineError():
            headers = {"x-should-retry": "false"}  # the same work would take as long again
            return ApiError(504, "timeout_error", str(error), "deadline_exceeded", headers=headers)
        case OverloadedError():
            headers = _retry_headers(error.retry_after_s)
            return ApiError(
                503, "overloaded_error", str(error), "engine_overloaded", headers=headers
            )
        case ExpertUnavailableError():
            return _unavailable(error.public, "expert_unavailable")
        case AbortedError():
            return _unavailable("the request was aborted", "request_aborted")
        case QuarantineError():
            headers = {"x-should-retry": "false"}  # it would end expert workers again
            return ApiError(500, "server_error", str(error), "request_quarantined", headers=headers)
        case EngineError() | PeerError():
            _log.error("request %s failed: %s", request_id, error)
            return ApiError(500, "server_error", "the engine failed", "engine_error")
        case web.HTTPException():
            return _http_error(error)
    _log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, "server_error", "internal error", "internal_error")


def _retry_headers(seconds: float) -> dict[str, str]:
    """Retry-After counts whole seconds; OpenAI's clients also read milliseconds."""
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def _unavailable(message: str, code: str) -> ApiError:
    headers = _retry_headers(_UNAVAILABLE_RETRY_S)
    return ApiError(503, "service_unavailable", message, code, headers=headers)


def _http_error(error: web.HTTPException) -> ApiError:
    """What aiohttp raises by itself."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(
                405,
                "invalid_request_error",
                f"this endpoint does not know {error.method[:20]}; it knows {allowed}",
                "method_not_allowed",
                headers={"Allow": allowed},
            )
        case web.HTTPRequestEntityTooLarge():
            message = "the body is too large"
            return ApiError(413, "invalid_request_error", message, "request_too_large")
        case web.HTTPServerError():
            return ApiError(error.status, "server_error", "internal error", "internal_error")
    return ApiError(error.status, "invalid_request_error", "bad request", "bad_request")
