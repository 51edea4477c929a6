"""The published schemas of the OpenAI, Open Responses and Anthropic APIs, to check answers against.

The documents come with the package `llm-comply` and are read where it is installed. They are
OpenAPI; what JSON Schema spells otherwise is translated here. A few places are relaxed, each with
its reason: there the document contradicts what the API itself does.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jsonschema import Draft202012Validator

Json = Any
Document = Literal["openai_chat", "openresponses", "anthropic"]

_MAX_ERRORS = 8
"""Shown of one value."""


def check(document: Document, schema: str, value: Json) -> None:
    """Fails, with the path of everything that is wrong, unless the value follows the schema."""
    errors = sorted(_validator(document, schema).iter_errors(value), key=lambda e: e.json_path)
    found = [f"{error.json_path}: {_innermost(error)}" for error in errors[:_MAX_ERRORS]]
    assert found == [], f"not a {schema}: {'; '.join(found)}\n{json.dumps(value)[:2000]}"


def check_chat(value: Json) -> None:
    """A whole answer of /v1/chat/completions."""
    check("openai_chat", "CreateChatCompletionResponse", value)


def check_chat_chunk(value: Json) -> None:
    """A chunk of a streamed answer of /v1/chat/completions."""
    check("openai_chat", "CreateChatCompletionStreamResponse", value)


def check_completion(value: Json) -> None:
    """A whole answer of /v1/completions."""
    check("openai_chat", "CreateCompletionResponse", value)


def check_completion_chunk(value: Json) -> None:
    """A chunk of a streamed answer of /v1/completions."""
    check("openai_chat", "CompletionChunk", value)


def check_error(value: Json) -> None:
    """An error envelope; a word of ours beside the schema: the code is text, never a number."""
    check("openai_chat", "ErrorResponse", value)
    assert set(value) == {"error"}
    assert value["error"]["message"]


@cache
def _validator(document: Document, schema: str) -> Draft202012Validator:
    schemas = _schemas(document)
    assert schema in schemas, f"{document} has no schema {schema}"
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": schemas}}
    )


@cache
def _schemas(document: Document) -> dict[str, Json]:
    spec = importlib.util.find_spec("llm_comply")
    assert spec is not None, "llm-comply is not installed: make install"
    assert spec.origin is not None
    path = Path(spec.origin).parent / "specs" / f"{document}.json"
    schemas = json.loads(path.read_text())["components"]["schemas"]
    if document == "openai_chat":
        _relax_completions(schemas)
    if document == "openresponses":
        _relax_responses(schemas)
    translated = _translated(schemas)
    assert isinstance(translated, dict)
    return translated


def _relax_completions(schemas: dict[str, Json]) -> None:
    """Two things that the document leaves out of /v1/completions.

    The first token of an echoed prompt has no probability: null stands for it. And chunks, for
    which the document has no schema of their own, have a finish reason only at the end, and null in
    place of the usage until the last one.
    """
    whole = schemas["CreateCompletionResponse"]
    logprobs = whole["properties"]["choices"]["items"]["properties"]["logprobs"]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"]["nullable"] = True
    chunk = json.loads(json.dumps(whole))
    chunk["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
    chunk["properties"]["usage"]["nullable"] = True
    schemas["CompletionChunk"] = chunk


def _relax_responses(schemas: dict[str, Json]) -> None:
    """The document lets the schema of a JSON format be null alone, which leaves it no meaning."""
    schemas["JsonSchemaResponseFormat"]["properties"]["schema"]["anyOf"].append({"type": "object"})


def _translated(node: Json) -> Json:
    """OpenAPI 3.0 to JSON Schema: `nullable`, and limits that are flags."""
    if isinstance(node, list):
        return [_translated(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: _translated(value) for key, value in node.items()}
    for flag, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(flag), bool) and found.pop(flag):
            found[flag] = found.pop(limit)
    nullable = found.get("nullable")
    if isinstance(nullable, bool):
        del found["nullable"]
    return {"anyOf": [found, {"type": "null"}]} if nullable is True else found


def _innermost(error: Any) -> str:
    """The message that tells most: of alternatives, that of the one which fits best."""
    while error.context:
        error = max(error.context, key=lambda inner: len(inner.absolute_path))
    return f"{error.message[:300]} at {error.json_path}"
