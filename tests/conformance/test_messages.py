"""/v1/messages and /v1/messages/count_tokens, checked against the schemas of Anthropic's API."""

from __future__ import annotations

import json

import pytest

from tests.support import api_schema
from tests.support.api import Json
from tests.support.strict_client import StrictClient

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"enum": [1, 2]}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
EVENTS = {
    "message_start": "MessageStartEvent",
    "content_block_start": "ContentBlockStartEvent",
    "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
    "message_delta": "MessageDeltaEvent",
    "message_stop": "MessageStopEvent",
}


def _body(**fields: Json) -> Json:
    return {"messages": HELLO, "max_tokens": 16, "temperature": 0, **fields}


def _create(client: StrictClient, **fields: Json) -> Json:
    answer = client.ok(PATH, _body(**fields))
    api_schema.check("anthropic", "Message", answer)
    assert answer["id"].startswith("msg_")
    return answer


def _text(answer: Json) -> str:
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def _stream(client: StrictClient, **fields: Json) -> list[Json]:
    """Events other than pings; each is checked by its schema, and named as it says itself."""
    events = []
    for name, data in client.stream(PATH, _body(**fields, stream=True)).events:
        event = json.loads(data)
        assert name == event["type"]
        if name != "ping":
            api_schema.check("anthropic", EVENTS[name], event)
            events.append(event)
    return events


def _refused(client: StrictClient, path: str, body: Json, status: int = 400) -> Json:
    """The error object in Anthropic's own envelope."""
    answer = client.post(path, body)
    assert answer.status == status, (answer.status, answer.body)
    assert answer.json["type"] == "error"
    error = answer.json["error"]
    assert error["message"]
    return error


def test_whole_answer(client: StrictClient) -> None:
    """A message of one text block."""
    answer = _create(client)
    assert (answer["role"], answer["type"]) == ("assistant", "message")
    assert len(answer["content"]) == 1
    assert answer["stop_reason"] in ("max_tokens", "end_turn")
    assert answer["usage"]["output_tokens"] <= 16


def test_text_is_that_of_a_chat(client: StrictClient) -> None:
    """The same conversation, the same greedy answer."""
    chat = client.chat(max_tokens=16, ignore_eos=False)["choices"][0]["message"]["content"]
    assert _text(_create(client)) == chat


def _num_input(message: Json) -> int:
    """Tokens of the prompt; those of the prefix cache are counted apart."""
    usage = message["usage"]
    return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])


def test_system_prompt(client: StrictClient) -> None:
    """As a text or as blocks."""
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    texts = {_text(_create(client, system=system)) for system in ("Be brief.", blocks)}
    assert len(texts) == 1
    longer = _num_input(_create(client, system="Be brief."))
    assert longer > _num_input(_create(client))


def test_content_blocks(client: StrictClient) -> None:
    """Content as blocks is the text."""
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert _text(_create(client, messages=blocks)) == _text(_create(client))


def test_stop_reasons(client: StrictClient) -> None:
    """max_tokens, or the stop sequence that was met."""
    assert _create(client, max_tokens=1)["stop_reason"] == "max_tokens"
    free = _text(_create(client))
    stop = next(c for c in free[2:] if c.isascii() and c.isprintable() and not c.isspace())
    answer = _create(client, stop_sequences=[stop, "never"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert _text(answer) == free[: free.index(stop)]


def test_stream(client: StrictClient) -> None:
    """The events in their order; deltas add up to the whole text."""
    events = _stream(client)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    text = "".join(event["delta"]["text"] for event in events[2:-3])
    whole = _create(client)
    assert text == _text(whole)
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_tool_use(client: StrictClient) -> None:
    """A forced tool is used, whole and streamed; its result can be handed in."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 100}
        answer = _create(client, **fields)
        assert answer["stop_reason"] == "tool_use"
        use = next(block for block in answer["content"] if block["type"] == "tool_use")
        assert use["name"] == "get_weather"
        assert use["input"]["days"] in (1, 2)
        pieces = [
            event["delta"]["partial_json"]
            for event in _stream(client, **fields)
            if event.get("delta", {}).get("type") == "input_json_delta"
        ]
        assert json.loads("".join(pieces)) == use["input"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert _create(client, messages=turns, tools=[TOOL])["content"]


def test_count_tokens(client: StrictClient) -> None:
    """The number that the answer's usage reports; needs no max_tokens."""
    answer = client.ok("/v1/messages/count_tokens", {"messages": HELLO, "system": "Be brief."})
    api_schema.check("anthropic", "CountMessageTokensResponse", answer)
    assert answer["input_tokens"] == _num_input(_create(client, system="Be brief."))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "king", "content": "x"}]},
        {"temperature": 3},
        {"tools": [{"name": "x"}]},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nothing"}},
    ],
    ids=str,
)
def test_refused(client: StrictClient, fields: Json) -> None:
    """Anthropic's envelope, with its word for bad requests."""
    body = {name: value for name, value in _body(**fields).items() if value is not None}
    assert _refused(client, PATH, body)["type"] == "invalid_request_error"


def test_unknown_model(client: StrictClient) -> None:
    """404 with its word."""
    assert _refused(client, PATH, _body(model="claude-9"), 404)["type"] == "not_found_error"
