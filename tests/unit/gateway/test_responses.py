"""/v1/responses: requests, whole answers, typed events, and openai's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from expertmesh.errors import EngineError, OverloadedError
from gateway.sequence import FinishReason
from tests.support.openai_calls import post
from tests.support.scripted_engine import Gateway, byte_tokenizer, scripted_gateway
from tests.support.tool_templates import tool_model

PATH = "/v1/responses"
TOKENIZER = byte_tokenizer()
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": TOWN}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"town": "Köln"}}</tool_call>'
KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key", "prompt", "conversation", "user"),
}
"""What the specification wants in every response, and what openai's client knows besides."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server whose model writes calls as Hermes does."""
    async with scripted_gateway(model=tool_model()) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """openai's client."""
    base_url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as opened:
        yield opened


def prompt_of(gateway: Gateway) -> str:
    """The prompt of the latest request."""
    ids = gateway.engine.requests[-1].prompt_token_ids
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode()


async def stream(
    session: aiohttp.ClientSession, gateway: Gateway, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Events of a stream; the name of each is its type, and they are numbered."""
    async with session.post(gateway.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    events = []
    for number, block in enumerate(filter(None, text.split("\n\n"))):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def test_a_text_gets_a_response(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A whole response has every key of the resource and the text as an item."""
    body = {"model": "tiny", "input": "hello", "instructions": "Be kind.", "max_output_tokens": 50}
    status, answer = await post(session, gateway, PATH, body)
    assert (status, answer["status"], answer["object"]) == (200, "completed", "response")
    assert KEYS - set(answer) == set()
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "Hi there"
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (answer["store"], answer["instructions"]) == (False, "Be kind.")
    assert answer["usage"]["output_tokens"] == len("Hi there")
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 8
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert prompt_of(gateway) == f"{text}<|im_start|>assistant"


async def test_items_become_a_conversation(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Messages, calls and results of earlier turns are told to the model in order."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "sun"}],
        },
    ]
    status, answer = await post(session, gateway, PATH, {"input": items, "tools": [WEATHER]})
    assert status == 200, answer
    prompt = prompt_of(gateway)
    parts = ["weather?", "Let me see.", "get_weather", "get_weather", "rain", "sun"]
    position = prompt.index("weather?")
    for part in parts:
        position = prompt.index(part, position) + 1
    assert prompt.count("<|im_start|>assistant") == 2


async def test_the_limit_makes_it_incomplete(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A truncated response says so, whole and streamed."""
    body = {"input": "hello", "max_output_tokens": 3}
    _, answer = await post(session, gateway, PATH, body)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    events = await stream(session, gateway, body)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hi "


async def test_events_of_a_text(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The events come in the documented order, and the last one has the whole response."""
    events = await stream(session, gateway, {"input": "hello"})
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 8,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    deltas = "".join(event.get("delta", "") for event in events)
    assert deltas == events[-1]["response"]["output"][0]["content"][0]["text"] == "Hi there"
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


@pytest.mark.parametrize("text", ["plain", "", CALL, f"First. {CALL}{CALL} Last"])
async def test_streams_say_the_same_as_whole_answers(
    gateway: Gateway, session: aiohttp.ClientSession, text: str
) -> None:
    """The items that events add up to, and the last event, are those of the whole answer."""
    gateway.engine.answer = text or "<|im_end|>"
    body = {"input": "hello", "tools": [WEATHER]}
    _, answer = await post(session, gateway, PATH, body)
    events = await stream(session, gateway, body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [_plain(item) for item in done] == [_plain(item) for item in answer["output"]]
    arguments = [
        event["arguments"]
        for event in events
        if event["type"] == "response.function_call_arguments.done"
    ]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert arguments == [call["arguments"] for call in calls]
    assert len(calls) == text.count("<tool_call>")


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """An item without its ids, which are random."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


class Town(BaseModel):
    """What the model answers."""

    town: str


async def test_the_client_of_openai(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    """create, parse and stream of openai's client work, with formats and tools."""
    response = await client.responses.create(model="tiny", input="hello")
    assert response.output_text == "Hi there"
    gateway.engine.answer = '{"town": "Köln"}'
    parsed = await client.responses.parse(model="tiny", input="hello", text_format=Town)
    assert parsed.output_parsed == Town(town="Köln")
    assert "town" in gateway.engine.requests[-1].params.grammar
    gateway.engine.answer = f"Well. {CALL}"
    tools: Any = [WEATHER]
    async with client.responses.stream(model="tiny", input="hello", tools=tools) as events:
        kinds = {event.type async for event in events}
        final = await events.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "Well."
    call = final.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"town": "Köln"})


async def test_tool_choice(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    """A named tool gives its arguments, obliged by a grammar."""
    gateway.engine.answer = '{"town": "Rome"}'
    choice: Any = {"type": "function", "name": "get_weather"}
    tools: Any = [WEATHER]
    response = await client.responses.create(
        model="tiny", input="x", tools=tools, tool_choice=choice
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"town": "Rome"}')
    assert gateway.engine.requests[-1].params.grammar
    assert response.to_dict()["tool_choice"] == choice


FORMAT = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
BAD: list[tuple[dict[str, object], str, str]] = [
    ({}, "input", "invalid_value"),
    ({"input": None}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": ["a"]}, "input.0", "invalid_value"),
    ({"input": [{"content": "a"}]}, "input.0.role", "invalid_value"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input.0.content", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0",
        "unsupported_content_type",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "unsupported_parameter"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments", "invalid_value"),
    (
        {"input": [{"type": "function_call", "arguments": "{}", "name": "f"}]},
        "input.0.call_id",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a"}]},
        "input.0.output",
        "invalid_value",
    ),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", ""),
    ({"input": "a", "conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"input": "a", "background": True}, "background", "unsupported_parameter"),
    ({"input": "a", "truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", ""),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "a" * 9000}, "input", "context_length_exceeded"),
    ({"input": "a", "temperature": 3}, "temperature", "invalid_value"),
    ({"input": "a", "text": {"format": FORMAT}}, "text.format.schema", "invalid_grammar"),
    ({"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type", "invalid_value"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type", "invalid_value"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools.0.name", "invalid_value"),
    ({"input": "a", "tools": {}}, "tools", "invalid_value"),
    (
        {"input": "a", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        "invalid_value",
    ),
    ({"input": "a", "model": "other"}, "model", "model_not_found"),
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_wrong_is_named(
    gateway: Gateway, session: aiohttp.ClientSession, streamed: bool
) -> None:
    """Errors speak of the parameters that the client sent, and are HTTP errors in streams too."""
    for body, param, code in BAD:
        status, answer = await post(session, gateway, PATH, {**body, "stream": streamed})
        error = answer["error"]
        expected = (404 if param == "model" else 400, param, code or "unsupported_parameter")
        assert (status, error["param"], error["code"]) == expected, body
    assert gateway.engine.requests == []


async def test_errors_before_the_first_token_are_http_errors(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A full queue is a 503 for a stream as well."""
    gateway.engine.refuse = OverloadedError("full")
    status, answer = await post(session, gateway, PATH, {"input": "a", "stream": True})
    assert (status, answer["error"]["code"]) == (503, "engine_overloaded")


async def _say_x(gateway: Gateway) -> None:
    """Lets the engine say one letter as soon as it has a request."""
    gateway.engine.manual = True
    await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
    gateway.engine.emit("x")


async def test_errors_after_the_first_token_are_events(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A stream that fails ends with response.failed."""
    speaking = asyncio.create_task(_say_x(gateway))
    body = {"input": "a", "stream": True}
    async with session.post(gateway.url + PATH, json=body) as response:
        await speaking
        await response.content.readuntil(b"delta\n")
        gateway.engine.emit(finish_reason=FinishReason.ERROR, error=EngineError("secret"))
        rest = (await response.read()).decode()
    last = json.loads(rest.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "engine_error", "message": "the engine failed"}
    assert "secret" not in rest


async def test_a_client_that_leaves_cancels(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Closing the connection frees the request in the engine."""
    speaking = asyncio.create_task(_say_x(gateway))
    body = {"input": "a", "stream": True}
    async with session.post(gateway.url + PATH, json=body) as response:
        await speaking
        await response.content.readuntil(b"delta\n")
        response.close()
    await gateway.engine.wait_for(lambda: len(gateway.engine.cancelled) == 1)
