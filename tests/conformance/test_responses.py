"""/v1/responses, checked against the Open Responses schemas."""

from __future__ import annotations

import json

import pytest
from llm_comply.schema import SSE_EVENT_TO_SCHEMA

from tests.support import api_schema
from tests.support.api import Json
from tests.support.strict_client import StrictClient

PATH = "/v1/responses"
HELLO = [{"type": "message", "role": "user", "content": "hello"}]
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"days": {"enum": [1, 2]}},
        "required": ["days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def _body(**fields: Json) -> Json:
    return {"input": "hello", "max_output_tokens": 16, "temperature": 0, **fields}


def _create(client: StrictClient, **fields: Json) -> Json:
    answer = client.ok(PATH, _body(**fields))
    _check_resource(answer)
    return answer


def _check_resource(answer: Json) -> None:
    api_schema.check("openresponses", "ResponseResource", answer)
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    if usage := answer["usage"]:
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert {"input_tokens_details", "output_tokens_details"} <= set(usage)


def _text(answer: Json) -> str:
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    assert message["role"] == "assistant"
    return "".join(part["text"] for part in message["content"])


def _stream(client: StrictClient, **fields: Json) -> list[Json]:
    """Typed events; each is checked by its schema, and named as it says itself."""
    stream = client.stream(PATH, _body(**fields, stream=True))
    events = []
    for name, data in stream.events:
        if data == "[DONE]":
            assert (name, data) == stream.events[-1]
            continue
        event = json.loads(data)
        assert name == event["type"]
        api_schema.check("openresponses", SSE_EVENT_TO_SCHEMA[name], event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_text_input(client: StrictClient) -> None:
    """A text is answered; every key of the resource is there."""
    answer = _create(client)
    assert answer["status"] in ("completed", "incomplete")
    assert answer["usage"]["output_tokens"] <= 16
    assert answer["instructions"] is None
    assert answer["tools"] == []
    assert answer["error"] is None


def test_items_mean_the_text(client: StrictClient) -> None:
    """Input as items, with texts or parts, is the same as the text."""
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    texts = {_text(_create(client, input=value)) for value in ("hello", HELLO, parts)}
    assert len(texts) == 1


def test_instructions(client: StrictClient) -> None:
    """They lead the conversation, and are told back."""
    answer = _create(client, instructions="Be brief.")
    assert answer["instructions"] == "Be brief."
    assert answer["usage"]["input_tokens"] > _create(client)["usage"]["input_tokens"]


def test_length(client: StrictClient) -> None:
    """An answer cut by its limit is incomplete, and says why."""
    answer = _create(client, max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_conversation(client: StrictClient) -> None:
    """Earlier answers may be handed back as they came."""
    first = _create(client)
    again = [*HELLO, *first["output"], {"role": "user", "content": "more"}]
    longer = _create(client, input=again)
    assert longer["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_stream(client: StrictClient) -> None:
    """The events in their order; deltas add up to the text of the whole answer."""
    events = _stream(client)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    last = events[-1]["response"]
    _check_resource(last)
    assert "".join(deltas) == _text(last) == _text(_create(client))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_json_schema(client: StrictClient) -> None:
    """text.format constrains the text."""
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    answer = _create(client, text={"format": form}, max_output_tokens=100)
    assert answer["status"] == "completed"
    assert 0 <= json.loads(_text(answer))["age"] <= 120
    assert answer["text"]["format"]["name"] == "person"


def test_function_call(client: StrictClient) -> None:
    """A required tool is called, whole and streamed, and its result can be handed in."""
    fields = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100}
    answer = _create(client, **fields)
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"])["days"] in (1, 2)
    events = _stream(client, **fields)
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.function_call_arguments.delta"
    ]
    assert json.loads("".join(deltas)) == json.loads(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    assert _create(client, input=[*HELLO, call, result], tools=[TOOL])["output"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input", {"input": 3}),
        ("temperature", {"temperature": -1}),
        ("max_output_tokens", {"max_output_tokens": -1}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("text", {"text": {"format": {"type": "poem"}}}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
    ],
)
def test_refused(client: StrictClient, param: str, fields: Json) -> None:
    """Bad input is named in the same envelope as elsewhere."""
    assert client.refused(PATH, _body(**fields))["param"].startswith(param)
