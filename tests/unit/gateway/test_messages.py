"""/v1/messages: requests, whole answers, events, errors, and Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

from expertmesh.errors import EngineError, OverloadedError
from gateway.sequence import FinishReason
from tests.support.openai_calls import post
from tests.support.scripted_engine import Gateway, byte_tokenizer, scripted_gateway
from tests.support.tool_templates import tool_model

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZER = byte_tokenizer()
WEATHER = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"town": "Köln"}}</tool_call>'
ASK: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server whose model writes calls as Hermes does."""
    async with scripted_gateway(model=tool_model()) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client."""
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as opened:
        yield opened


def prompt_of(gateway: Gateway) -> str:
    """The prompt of the latest request."""
    ids = gateway.engine.requests[-1].prompt_token_ids
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode()


async def stream(
    session: aiohttp.ClientSession, gateway: Gateway, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Events of a stream; the name of each is its type."""
    async with session.post(gateway.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    events = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_a_message(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A whole answer has all fields; the system text comes first in the prompt."""
    body = {**ASK, "model": "tiny", "system": [{"type": "text", "text": "Be kind."}]}
    status, answer = await post(session, gateway, PATH, body)
    assert status == 200, answer
    assert answer.pop("id").startswith("msg_")
    prompt = prompt_of(gateway)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hi there", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": len(gateway.engine.requests[0].prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 8,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "cache_creation": None,
            "inference_geo": None,
            "service_tier": "standard",
        },
    }
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<")


async def test_stop_reasons(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The limit, a stop sequence, and a tool."""
    _, answer = await post(session, gateway, PATH, {**ASK, "max_tokens": 2})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    _, answer = await post(session, gateway, PATH, {**ASK, "stop_sequences": ["the", "x"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "the")
    assert answer["content"][0]["text"] == "Hi "
    gateway.engine.answer = CALL
    _, answer = await post(session, gateway, PATH, {**ASK, "tools": [WEATHER]})
    assert answer["stop_reason"] == "tool_use"
    (block,) = answer["content"]
    assert block.pop("id").startswith("toolu_")
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert block["input"] == {"town": "Köln"}


async def test_cached_tokens_are_counted_apart(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """What the prefix cache had is no input, but is told."""
    gateway.engine.num_cached = 16
    _, answer = await post(session, gateway, PATH, ASK)
    num_prompt = len(gateway.engine.requests[0].prompt_token_ids)
    usage = answer["usage"]
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (16, num_prompt - 16)


async def test_blocks_become_a_conversation(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Calls and results of earlier turns are told to the model in order, errors as such."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"town": "Köln"}},
                {"type": "tool_use", "id": "b", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no town"}],
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    body = {**ASK, "messages": messages, "tools": [WEATHER]}
    status, answer = await post(session, gateway, PATH, body)
    assert status == 200, answer
    prompt = prompt_of(gateway)
    position = prompt.index("weather?")
    for part in ("Let me see.", "Köln", "get_weather", "rain", "Error: no town", "and now?"):
        position = prompt.index(part, position) + 1
    assert "Hm" not in prompt


async def test_events_of_a_text(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The events come in the documented order, with the usage at both ends."""
    events = await stream(session, gateway, ASK)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 8,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] > 0
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == 8
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "Hi there"


@pytest.mark.parametrize("text", ["plain", CALL, f"First. {CALL}{CALL} Last", CALL[:-20]])
async def test_streams_say_the_same_as_whole_answers(
    gateway: Gateway, session: aiohttp.ClientSession, text: str
) -> None:
    """The blocks that events add up to are those of the whole answer."""
    gateway.engine.answer = text
    body = {**ASK, "tools": [WEATHER]}
    _, answer = await post(session, gateway, PATH, body)
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in await stream(session, gateway, body):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            texts[-1] += event["delta"].get("text") or event["delta"].get("partial_json", "")
    assert [block["type"] for block in blocks] == [block["type"] for block in answer["content"]]
    for block, found, expected in zip(blocks, texts, answer["content"], strict=True):
        if block["type"] == "text":
            assert found == expected["text"]
        else:
            assert block["name"] == expected["name"]
            complete = found.endswith("}")
            assert (json.loads(found) if complete else {}) == expected["input"]


async def test_the_client_of_anthropic(client: anthropic.AsyncAnthropic, gateway: Gateway) -> None:
    """create, stream and count_tokens of Anthropic's client work, with tools."""
    messages: Any = ASK["messages"]
    tools: Any = [WEATHER]
    message = await client.messages.create(model="tiny", max_tokens=50, messages=messages)
    assert message.content[0].type == "text"
    assert message.content[0].text == "Hi there"
    count = await client.messages.count_tokens(model="tiny", messages=messages)
    assert count.input_tokens == message.usage.input_tokens
    gateway.engine.answer = f"Well. {CALL}"
    async with client.messages.stream(
        model="tiny", max_tokens=500, messages=messages, tools=tools
    ) as events:
        texts = [text async for text in events.text_stream]
        final = await events.get_final_message()
    assert "".join(texts) == "Well."
    block = final.content[1]
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"town": "Köln"})
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 10


async def test_tool_choice(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """tool and any are obliged by a grammar; none hides the tools."""
    gateway.engine.answer = '{"town": "Rome"}'
    choice: dict[str, object] = {"type": "tool", "name": "get_weather"}
    body = {**ASK, "tools": [WEATHER], "tool_choice": choice}
    _, answer = await post(session, gateway, PATH, body)
    assert answer["content"][0]["input"] == {"town": "Rome"}
    gateway.engine.answer = '{"name": "get_weather", "arguments": {"town": "Rome"}}'
    choice = {"type": "any", "disable_parallel_tool_use": True}
    _, answer = await post(session, gateway, PATH, {**body, "tool_choice": choice})
    assert answer["content"][0]["input"] == {"town": "Rome"}
    assert all(request.params.grammar for request in gateway.engine.requests)
    await post(session, gateway, PATH, {**body, "tool_choice": {"type": "none"}})
    assert "get_weather" not in prompt_of(gateway)


async def test_a_schema_for_the_output(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """output_config.format becomes a grammar."""
    wanted = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    status, _ = await post(session, gateway, PATH, {**ASK, "output_config": wanted})
    assert status == 200
    assert "town" in gateway.engine.requests[-1].params.grammar


def asked(content: object, role: object = "user") -> dict[str, object]:
    """A request with one message."""
    return {"max_tokens": 5, "messages": [{"role": role, "content": content}]}


BAD: list[tuple[dict[str, object], str]] = [
    ({"messages": ASK["messages"]}, "max_tokens"),
    ({**ASK, "max_tokens": 0}, "max_tokens"),
    ({**ASK, "max_tokens": None}, "max_tokens"),
    ({**ASK, "max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 5}, "messages"),
    ({"max_tokens": 5, "messages": []}, "messages"),
    ({"max_tokens": 5, "messages": [1]}, "messages.0"),
    (asked("a", role="tool"), "messages.0.role"),
    (asked("a", role="assistant"), "messages.0.role"),
    (asked(None), "messages.0.content"),
    (asked([]), "messages.0.content"),
    (asked(["a"]), "messages.0.content.0"),
    (asked([{"type": "image"}]), "messages.0.content.0"),
    (asked([{"type": "text"}]), "messages.0.content.0.text"),
    (asked([{"type": "tool_result"}]), "messages.0.content.0.tool_use_id"),
    (asked([{"type": "tool_result", "content": 5}]), "messages.0.content.0.content"),
    (
        {
            "max_tokens": 5,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]},
                *ASK["messages"],
            ],
        },
        "messages.0.content.0.input",
    ),
    ({**ASK, "system": 5}, "system"),
    ({**ASK, "stop_sequences": "x"}, "stop_sequences"),
    ({**ASK, "stop_sequences": [""]}, "stop_sequences"),
    ({**ASK, "temperature": 3}, "temperature"),
    ({**ASK, "tools": {}}, "tools"),
    ({**ASK, "tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({**ASK, "tools": [{"name": "f g", "input_schema": {}}]}, "tools.0.name"),
    ({**ASK, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
    (
        {
            **ASK,
            "tools": [{"name": "f", "input_schema": {"not": {}}}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
        "tools.0.input_schema",
    ),
    ({**ASK, "tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ({**ASK, "tools": [WEATHER], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    (
        {**ASK, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice.name",
    ),
    ({**ASK, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({**ASK, "model": "other"}, "model"),
    (asked("a" * 9000), "messages"),
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_wrong_is_named(
    gateway: Gateway, session: aiohttp.ClientSession, streamed: bool
) -> None:
    """Errors have Anthropic's envelope and speak of the parameters that the client sent."""
    for body, param in BAD:
        status, answer = await post(session, gateway, PATH, {**body, "stream": streamed})
        assert status == (404 if param == "model" else 400), body
        assert answer["type"] == "error"
        kind = "not_found_error" if param == "model" else "invalid_request_error"
        assert (answer["error"]["type"], answer["error"]["param"]) == (kind, param), body
    assert gateway.engine.requests == []


async def test_the_client_of_anthropic_knows_the_errors(
    client: anthropic.AsyncAnthropic, gateway: Gateway
) -> None:
    """Each error becomes the exception that the client has for it."""
    messages: Any = ASK["messages"]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=5, messages=messages)
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model="tiny", max_tokens=5, messages=[])
    gateway.engine.refuse = OverloadedError("full")
    with pytest.raises(anthropic.APIStatusError) as caught:
        await client.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert caught.value.status_code == 503
    assert "overloaded_error" in str(caught.value)


async def test_errors_after_the_first_token_are_events(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A stream that fails ends with an error event."""

    async def speak() -> None:
        gateway.engine.manual = True
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        gateway.engine.emit("x")

    speaking = asyncio.create_task(speak())
    async with session.post(gateway.url + PATH, json={**ASK, "stream": True}) as response:
        await speaking
        await response.content.readuntil(b"event: content_block_delta\n")
        gateway.engine.emit(finish_reason=FinishReason.ERROR, error=EngineError("secret"))
        rest = (await response.read()).decode()
    last = json.loads(rest.strip().rpartition("data: ")[2])
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "secret" not in rest


async def test_other_paths_keep_their_errors(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A wrong method has the envelope of its path."""
    async with session.get(gateway.url + PATH) as response:
        assert (response.status, (await response.json())["type"]) == (405, "error")
    async with session.get(gateway.url + "/v1/responses") as response:
        assert (response.status, "type" in await response.json()) == (405, False)
