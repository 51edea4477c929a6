"""Chats with tools, /v1/responses and /v1/messages with every value replaced by odd ones: each gets
an answer or an error of its own, and nothing is a failure of ours."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.openai_calls import CHAT, post
from tests.support.scripted_engine import Gateway, scripted_gateway
from tests.support.tool_templates import HERMES, PLAIN, tool_model

ODD: tuple[object, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, "", "a", "\x00\u202e\ufffe", "<|im_end|>", [], {}, [[]]),
    *(
        [None],
        ["a"],
        {"type": "text"},
        {"type": []},
        {"": {}},
        {"$ref": "#"},
        [{"type": "function"}],
    ),
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
        },
    },
    "/v1/completions": {"prompt": "p", "structured_outputs": {"choice": ["a", "b"]}},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
        ],
        "instructions": "i",
        "max_output_tokens": 9,
        "metadata": {"k": "v"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    "/v1/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}],
            },
        ],
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.fixture(params=[HERMES, PLAIN], ids=["native", "described"])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    """A server with one of two ways to tell a model of tools."""
    async with scripted_gateway(model=tool_model(request.param)) as running:
        running.engine.answer = '{"a": 1}'
        yield running


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all values in a body."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else ()
    entries = enumerate(value) if isinstance(value, list) else entries
    for key, item in entries:
        yield from places(item, (*path, key))


def replaced(body: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A body with another value at a path."""
    changed: Any = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert isinstance(changed, dict)
    return changed


@pytest.mark.parametrize("path", BODIES)
async def test_odd_values_are_answered(gateway: Gateway, path: str) -> None:
    """Whatever stands in whatever place, the answer is 200 or names a parameter of the request."""
    body = BODIES[path]
    async with aiohttp.ClientSession() as session:
        assert (await post(session, gateway, path, body))[0] == 200
        for place in places(body):
            for odd in ODD:
                status, answer = await post(session, gateway, path, replaced(body, place, odd))
                if status != 200:
                    assert status == 400, (place, odd, answer)
                    param = answer["error"]["param"]
                    assert param is None or param.split(".")[0] in body, (place, odd, answer)
