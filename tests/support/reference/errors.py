"""docs/errors.md: what the server answers to examples of all its errors, and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from google.rpc import error_details_pb2
from google.rpc.code_pb2 import Code

from gateway.grpc_errors import status_of
from gateway.openai.errors import ApiError, api_error, no_endpoint
from tests.support.reference.error_rows import ROWS, ErrorRow
from tests.support.reference.markdown import page, table

PROTO = Path(__file__).parents[3] / "proto" / "expertmesh" / "v1" / "expert_service.proto"

HTTP = """\
A failed HTTP request is answered `{"error": {"message", "type", "param", "code"}}`; `param` is
the path of the parameter, or null. `/v1/messages` answers as Anthropic's clients expect it, with
the same code and parameter. In a stream, an error after the first token is an event of the same
content, and `[DONE]` follows. Every answer has `X-Request-Id`: the client's own, or a fresh one.
A gRPC status has the code as `reason` of its `google.rpc.ErrorInfo`, in capitals, `RetryInfo`
where `Retry-After` would be, and `BadRequest` with the parameter.

*Retry* says which header tells OpenAI's clients whether to try again: after a time, or not at
all. Without one they decide by the status."""

FORWARD = """\
What an expert worker answers to a call instead of outputs. Clients never see one: the attention
worker asks another copy where that can help, and else the step fails (`engine_error`) or waits
for a copy (`expert_unavailable`). They are in logs, and counted by `moe_dispatch_faults_total`."""

_CODE = re.compile(r"// (?P<text>[^\n]+)\n\s+CODE_(?P<name>\w+) = (?P<number>\d+);")


def errors_page() -> str:
    """The whole document."""
    return page(
        "Errors",
        HTTP,
        table(("HTTP", "type", "code", "gRPC", "retry", "meaning", "what to do"), _rows()),
        "## Between attention workers and expert workers",
        FORWARD,
        table(("code", "meaning"), _forward_codes()),
        "Errors at start end a process with an [exit code](configuration.md#exit-codes) and one "
        "line: `error: WHAT. WHY. FIX`.",
    )


def _rows() -> Iterator[tuple[str, ...]]:
    for row in sorted(ROWS, key=_order):
        answer = answered(row)
        yield (
            str(answer.status) if row.in_http else "",
            f"`{answer.type}`" if row.in_http else "",
            f"`{answer.code}`",
            grpc_status(row),
            _retry(answer),
            row.meaning,
            row.remedy,
        )


def _order(row: ErrorRow) -> int:
    return answered(row).status if row.in_http else 400


def answered(row: ErrorRow) -> ApiError:
    """What the HTTP API answers."""
    if isinstance(row.example, web.HTTPNotFound):
        return no_endpoint("GET", "/")
    with _unlogged():
        return api_error(row.example, "an-id")


def grpc_status(row: ErrorRow) -> str:
    """Name of what the gRPC API answers; empty if it has nothing of the kind.

    Raises:
        ValueError: Both APIs call it differently.
    """
    if not row.in_grpc:
        return ""
    with _unlogged():
        status = status_of(row.example, "Generate")
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    code = answered(row).code
    if info.reason.lower() != code:
        raise ValueError(f"{info.reason} in gRPC, {code} in HTTP")
    return f"`{Code.Name(status.code)}`"


def _retry(answer: ApiError) -> str:
    if "Retry-After" in answer.headers:
        return "`Retry-After`"
    return "`x-should-retry: false`" if "x-should-retry" in answer.headers else ""


def _forward_codes() -> Iterator[tuple[str, str]]:
    body = PROTO.read_text().partition("message ForwardError")[2]
    for found in _CODE.finditer(body):
        if int(found["number"]):
            yield f"`{found['name']}`", found["text"]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Failures of the server are logged where they are answered; these are examples."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
