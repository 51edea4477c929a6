"""What docs/errors.md says of each error code: an example for the code to answer, and two texts."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from expertmesh.errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    ModelNotFoundError,
    OverloadedError,
    QuarantineError,
    RequestError,
    UnsupportedError,
)
from gateway.openai.body import BodyError
from gateway.openai.errors import AbortedError
from gateway.placement.operator import PlacementRefusedError, UnknownWorkerError


@dataclass(frozen=True)
class ErrorRow:
    """One error code."""

    example: Exception
    """What the server raises in such a case."""
    meaning: str
    remedy: str
    in_http: bool = True
    in_grpc: bool = True


def _request(code: str, meaning: str, remedy: str, **apis: bool) -> ErrorRow:
    return ErrorRow(RequestError("", code=code), meaning, remedy, **apis)


def _body(status: int, code: str, meaning: str, remedy: str) -> ErrorRow:
    return ErrorRow(BodyError(status, "", code), meaning, remedy, in_grpc=False)


def _http(error: web.HTTPException, meaning: str, remedy: str) -> ErrorRow:
    return ErrorRow(error, meaning, remedy, in_grpc=False)


ROWS = (
    _request(
        "invalid_value",
        "A parameter has a type or a value that cannot be.",
        "Change the parameter that `param` names; the message says what was expected.",
    ),
    ErrorRow(
        UnsupportedError("", param="x"),
        "A parameter that this server does not have, or a field that it does not know.",
        "Leave it out, or correct its name.",
    ),
    _request(
        "unsupported_by_model",
        "The model cannot do it: it has no tokenizer, no chat template, no tools.",
        "Leave it out, send token ids, or serve another model.",
    ),
    _request(
        "unsupported_content_type",
        "Images, audio or files in a message.",
        "Send text.",
        in_grpc=False,
    ),
    ErrorRow(
        ContextLengthError("", param="prompt"),
        "Prompt, or prompt and wanted output, are longer than the context.",
        "Shorten the prompt, ask for fewer tokens, set `truncate_prompt_tokens`, or serve with a "
        "larger `--max-model-len`.",
    ),
    _request("empty_prompt", "A prompt without a token.", "Send at least one token."),
    _request(
        "invalid_token_id",
        "A token id that the model does not have.",
        "Take ids from the same model's `/tokenize`.",
    ),
    _request(
        "invalid_grammar",
        "A schema, regular expression or grammar that cannot be used, or is too large.",
        "The message says where; see [structured output](structured_output.md).",
    ),
    _request(
        "request_id_in_use",
        "A request of this id runs already.",
        "Use a fresh id for each request.",
    ),
    _request(
        "invalid_message",
        "The bytes are no message of this method.",
        "Generate the client from this version's proto.",
        in_http=False,
    ),
    _request(
        "invalid_json",
        "The body is not one JSON object.",
        "Send JSON; the message has the position.",
        in_grpc=False,
    ),
    _request(
        "invalid_unicode",
        "The body is not UTF-8, or has half a surrogate pair.",
        "Encode the body as UTF-8.",
        in_grpc=False,
    ),
    _request("json_too_deep", "JSON is nested too deep.", "Nest it less.", in_grpc=False),
    _request("json_too_large", "JSON has too many values.", "Split the request.", in_grpc=False),
    _body(
        400,
        "invalid_body",
        "The body is not framed as HTTP demands.",
        "Look at the client, or at a proxy in between.",
    ),
    _http(
        web.HTTPBadRequest(),
        "The request is not valid HTTP.",
        "Look at the client; does it speak TLS to a port of plain text?",
    ),
    ErrorRow(
        AuthenticationError(""),
        "No API key was shown, or one that is not accepted.",
        "Send `Authorization: Bearer KEY`; see [who may call](security.md).",
    ),
    ErrorRow(
        ModelNotFoundError(""),
        "The model named is not the one served.",
        "`GET /v1/models` lists the name; `--served-model-name` sets it.",
    ),
    _http(
        web.HTTPNotFound(),
        "No such path.",
        "Give clients a base URL that ends in `/v1`.",
    ),
    ErrorRow(
        UnknownWorkerError("w", ()),
        "`/admin`: there is no expert worker of that name.",
        "`expertmesh placement show` lists them.",
        in_grpc=False,
    ),
    ErrorRow(
        PlacementRefusedError(""),
        "`/admin`: it cannot be done as things are.",
        "The message says why: for instance, this gateway does not lead, or placement is static.",
        in_grpc=False,
    ),
    _http(
        web.HTTPMethodNotAllowed("GET", ["POST"]),
        "The path knows other methods.",
        "See the header `Allow`.",
    ),
    _body(
        408,
        "request_timeout",
        "The body did not arrive in time.",
        "Look at the client's network.",
    ),
    _body(413, "request_too_large", "The body is too large.", "Send less at a time."),
    _body(
        415,
        "unsupported_media_type",
        "The body is not announced as JSON.",
        "Send `Content-Type: application/json`.",
    ),
    _body(
        415,
        "unsupported_content_encoding",
        "The body is compressed.",
        "Send it as it is.",
    ),
    ErrorRow(
        OverloadedError(""),
        "Too many requests wait or are connected, or the gateway is stopping.",
        "Try again after `Retry-After`; add gateways, or raise `--max-num-queued-reqs`.",
    ),
    ErrorRow(
        ExpertUnavailableError([(0, 0)]),
        "An expert that the request needs has no usable copy.",
        "Try again after `Retry-After`; operators: `/ready` names the experts and why "
        "([troubleshooting](troubleshooting.md#it-is-up-and-not-ready)).",
    ),
    ErrorRow(
        AbortedError(),
        "An operator, or the end of the gateway, ended the request.",
        "Try again.",
        in_grpc=False,
    ),
    ErrorRow(
        DeadlineError(""),
        "Not done by its deadline: `timeout_s`, the deadline of a gRPC call, or "
        "`--request-timeout-s`.",
        "Ask for fewer tokens or allow more time. Not worth a retry as it is.",
    ),
    ErrorRow(
        QuarantineError(0),
        "Expert workers are lost when they compute this request.",
        "Do not send it again; operators: the log of the expert workers that ended "
        "([ADR 0017](adr/0017-rows-that-kill.md)).",
    ),
    ErrorRow(
        EngineError(""),
        "A step or an attention worker failed.",
        "Try again; operators: look for the request id in the gateway's log.",
    ),
    ErrorRow(
        Exception(),
        "A mistake of the server.",
        "Operators: look for the request id in the gateway's log, and report it.",
    ),
)
