"""From the bytes of a request to a JSON object, whatever a client sends.

The limits come first: bytes while reading, then depth and number of values by a scan that costs a
few passes at C speed, and only then the decoder.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Final, NoReturn

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from expertmesh.errors import ExpertMeshError, RequestError
from gateway.service import ApiLimits, GenerationFrontend

JsonObject = dict[str, object]

_IN_THREAD_FROM: Final = 64 * 1024
"""Bytes from which a body is decoded outside the event loop."""
_MEDIA_TYPES: Final = ("application/json", "text/json", "application/x-www-form-urlencoded", "")
"""What JSON is sent as: curl says it is a form unless told otherwise."""
_MAX_DIGITS: Final = 40
"""Digits of an integer; no parameter needs more than 20."""


class BodyError(ExpertMeshError):
    """A body that is not even looked at.

    Args:
        status: HTTP status.
        message: For the client.
        code: Of the error envelope.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def read_json(request: web.Request, frontend: GenerationFrontend) -> JsonObject:
    """The body of a request as a JSON object.

    Raises:
        BodyError: Too large, too slow, or encoded.
        RequestError: Not the JSON of an object.
    """
    limits = frontend.limits
    check_head(request, limits)
    data = await _read(request, limits)
    if len(data) < _IN_THREAD_FROM:
        return decode_object(data, limits)
    return await frontend.run_in_thread(decode_object, data, limits)


def check_head(request: web.BaseRequest, limits: ApiLimits) -> None:
    """Refuses a body by the request's header alone.

    Raises:
        BodyError: The body is too large, encoded, or something else than JSON.
    """
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES and not media_type.endswith("+json"):
        message = "the Content-Type is not application/json"
        raise BodyError(415, message, "unsupported_media_type")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "Content-Encoding is not supported; send the body as it is"
        raise BodyError(415, message, "unsupported_content_encoding")
    if (request.content_length or 0) > limits.max_body_bytes:
        _refuse_size(limits)


async def _read(request: web.Request, limits: ApiLimits) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limits.max_body_bytes:
                    _refuse_size(limits)
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise BodyError(408, message, "request_timeout") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise BodyError(400, "the body is not framed as HTTP demands", "invalid_body") from error
    return b"".join(chunks)


def _refuse_size(limits: ApiLimits) -> NoReturn:
    message = f"the body is longer than {limits.max_body_bytes} bytes"
    raise BodyError(413, message, "request_too_large")


def decode_object(data: bytes, limits: ApiLimits) -> JsonObject:
    """Decodes the JSON of an object, strictly.

    Raises:
        RequestError: Its code says in which way the body is unusable.
    """
    if not data.strip():
        raise _invalid("the body is empty; expected a JSON object")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: byte {error.start} is wrong"
        raise RequestError(message, code="invalid_unicode") from error
    _check_shape(data, limits)
    value = _Decoder().decode(text)
    if not isinstance(value, dict):
        raise _invalid("the body is not a JSON object")
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


# A string that is never closed matches to the end, so that the scan stays linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _check_shape(data: bytes, limits: ApiLimits) -> None:
    """Refuses bodies that would cost a decoder much: very deep or with very many values."""
    num_opens = data.count(b"[") + data.count(b"{")
    if num_opens <= limits.max_json_depth and data.count(b",") < limits.max_json_nodes - num_opens:
        return  # an upper bound: some of them may be inside strings
    bare, num_strings = _STRING.subn(b"", data, count=2 * limits.max_json_nodes)
    brackets = bare.translate(None, delete=_NOT_BRACKETS)
    some = np.frombuffer(brackets[: 2 * limits.max_json_nodes], dtype=np.uint8)
    steps = np.where((some == ord("[")) | (some == ord("{")), 1, -1)
    if np.cumsum(steps).max(initial=0) > limits.max_json_depth:
        message = f"the JSON is nested deeper than {limits.max_json_depth} levels"
        raise RequestError(message, code="json_too_deep")
    num_nodes = max(len(brackets) // 2 + bare.count(b","), num_strings // 2)
    if num_nodes >= limits.max_json_nodes:
        message = f"the JSON has more than {limits.max_json_nodes} values"
        raise RequestError(message, code="json_too_large")


class _BadNumber:
    """Stands for a number that cannot be used, until the name of its parameter is known."""


class _Decoder:
    """Decodes one body; refuses what the standard library lets pass."""

    def __init__(self) -> None:
        self._has_bad_number = False

    def decode(self, text: str) -> object:
        """Decodes the whole text."""
        try:
            value: object = json.loads(
                text,
                object_pairs_hook=self._object,
                parse_constant=_refuse_constant,
                parse_int=self._int,
                parse_float=self._float,
            )
        except ValueError as error:
            raise _invalid(_json_message(error)) from error
        if self._has_bad_number:
            raise _number_error(None)
        return value

    def _object(self, pairs: list[tuple[str, object]]) -> JsonObject:
        found: JsonObject = {}
        for key, value in pairs:
            if key in found:
                name = key[:60]
                raise RequestError(
                    f"{name} occurs twice in one object", param=name, code="invalid_json"
                )
            if isinstance(value, _BadNumber):
                raise _number_error(key[:60])
            found[key] = value
        return found

    def _bad_number(self, text: str) -> _BadNumber:
        self._has_bad_number = True
        return _BadNumber()

    def _int(self, text: str) -> int | _BadNumber:
        return int(text) if len(text) <= _MAX_DIGITS else self._bad_number(text)

    def _float(self, text: str) -> float | _BadNumber:
        value = float(text)
        return value if abs(value) != float("inf") else self._bad_number(text)


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"the body is not valid JSON: {name} is not a JSON value")


def _number_error(param: str | None) -> RequestError:
    name = "a value" if param is None else param
    return RequestError(
        f"{name} is not a finite number of at most {_MAX_DIGITS} digits", param=param
    )


def _json_message(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"the body is not valid JSON: {error.msg} at character {error.pos}"
    return "the body is not valid JSON"


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")


def _check_unicode(value: object) -> None:
    """Refuses halves of surrogate pairs: they are not characters and cannot be answered."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and any("\ud800" <= letter <= "\udfff" for letter in item):
            raise RequestError(
                "a string holds half of a surrogate pair, which is not a character",
                code="invalid_unicode",
            )
