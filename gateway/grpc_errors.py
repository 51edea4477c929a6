"""Exceptions to gRPC statuses with google.rpc details, by the same rules as the HTTP API."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from google.rpc.code_pb2 import (
    ALREADY_EXISTS,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    UNAUTHENTICATED,
    UNAVAILABLE,
)

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

_log = logging.getLogger(__name__)

_DOMAIN = "expertmesh"
_MAX_MESSAGE_LEN = 1500
_UNAVAILABLE_RETRY_S = 2.0


def status_of(error: BaseException, method: str) -> status_pb2.Status:
    """What a client is told about an exception; unexpected ones are logged.

    Args:
        error: The exception.
        method: Name of the rpc, for the log.
    """
    match error:
        case ModelNotFoundError():
            resource = error_details_pb2.ResourceInfo(resource_type="model")
            return _status(NOT_FOUND, error.message, _info(error.code), resource)
        case RequestError():
            code = ALREADY_EXISTS if error.code == "request_id_in_use" else INVALID_ARGUMENT
            return _status(code, error.message, _bad_request(error), _info(error.code))
        case AuthenticationError():
            return _status(UNAUTHENTICATED, str(error), _info("invalid_api_key"))
        case DeadlineError():
            return _status(DEADLINE_EXCEEDED, str(error), _info("deadline_exceeded"))
        case OverloadedError():
            info = _info("engine_overloaded")
            return _status(UNAVAILABLE, str(error), info, _retry(error.retry_after_s))
        case ExpertUnavailableError():
            layers = ",".join(f"{layer}:{expert}" for layer, expert in error.missing[:32])
            info = _info("expert_unavailable", {"layer_expert": layers})
            return _status(UNAVAILABLE, error.public, info, _retry(_UNAVAILABLE_RETRY_S))
        case QuarantineError():
            info = _info("request_quarantined", {"layer": str(error.layer)})
            return _status(INTERNAL, str(error), info)
        case EngineError() | PeerError():
            _log.error("%s failed: %s", method, error)
            return _status(INTERNAL, "the engine failed", _info("engine_error"))
    _log.error("%s failed", method, exc_info=error)
    return _status(INTERNAL, "internal error", _info("internal_error"))


def _bad_request(error: RequestError) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=error.param or "", description=error.message[:_MAX_MESSAGE_LEN]
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _info(
    code: str | None, metadata: Mapping[str, str] | None = None
) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(
        reason=(code or "unknown").upper(), domain=_DOMAIN, metadata=metadata
    )


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(int(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _status(code: int, message: str, *details: Message) -> status_pb2.Status:
    packed = []
    for detail in details:
        any_message = AnyMessage()
        any_message.Pack(detail)
        packed.append(any_message)
    return status_pb2.Status(code=code, message=message[:_MAX_MESSAGE_LEN], details=packed)
