"""Tools of /v1/chat/completions, on a model of random weights: what must hold by construction."""

from __future__ import annotations

import json

from tests.support.api import Json
from tests.support.strict_client import CHAT, HELLO, StrictClient

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FREE = {"ignore_eos": False, "max_tokens": 256}


def _calls(answer: Json) -> list[Json]:
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    return list(calls)


def _check_weather(call: Json) -> None:
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "days"}
    assert arguments["days"] in (1, 2)


def test_named_tool(client: StrictClient) -> None:
    """The named function is called, with arguments that follow its schema."""
    answer = client.chat(**FREE, tools=[WEATHER, TIME], tool_choice=NAMED, temperature=1, seed=1)
    (call,) = _calls(answer)
    _check_weather(call)


def test_required_tool(client: StrictClient) -> None:
    """Some function is called; with one alone it is that one."""
    fields = {**FREE, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = _calls(client.chat(**fields))
    _check_weather(call)


def test_streamed_call(client: StrictClient) -> None:
    """First id, type and name with empty arguments, then pieces of the arguments."""
    fields = {**FREE, "tools": [WEATHER], "tool_choice": NAMED}
    chunks = client.chat_stream(**fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    first, *rest = deltas
    assert first["id"]
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert len(rest) > 1
    assert all(set(call) <= {"index", "function"} for call in rest)
    whole = "".join(call["function"]["arguments"] for call in rest)
    _check_weather({"type": "function", "function": {"name": "get_weather", "arguments": whole}})
    expected = _calls(client.chat(**fields))[0]["function"]["arguments"]
    assert json.loads(whole) == json.loads(expected)


def test_no_tool(client: StrictClient) -> None:
    """With "none", tools are text of the prompt at most."""
    answer = client.chat(tools=[WEATHER], tool_choice="none")
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_auto(client: StrictClient) -> None:
    """A model that says no call makes no call, streamed or not."""
    answer = client.chat(tools=[WEATHER])
    assert answer["choices"][0]["message"]["content"]
    assert client.chat_stream(tools=[WEATHER], tool_choice="auto")


def test_result_of_a_tool(client: StrictClient) -> None:
    """A conversation may hold calls and their results."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 1}'},
    }
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    plain = client.chat(messages=HELLO)["usage"]["prompt_tokens"]
    assert client.chat(messages=turns, tools=[WEATHER])["usage"]["prompt_tokens"] > plain + 20


def test_ids_differ_between_answers(client: StrictClient) -> None:
    """Ids of calls are never used twice."""
    fields = {**FREE, "tools": [WEATHER], "tool_choice": NAMED}
    ids = {_calls(client.chat(**fields))[0]["id"] for _ in range(2)}
    assert len(ids) == 2


def test_refused(client: StrictClient) -> None:
    """Tools that make no sense are named."""
    twice = [WEATHER, WEATHER]
    unknown = {"type": "function", "function": {"name": "nothing"}}
    for param, fields in (
        ("tools", {"tools": []}),
        ("tools", {"tools": twice}),
        ("tools", {"tools": [{"type": "function", "function": {}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": unknown}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "always"}),
        ("tool_choice", {"tool_choice": "required"}),
    ):
        error = client.refused(CHAT, {"messages": HELLO, **fields})
        assert error["param"].startswith(param), (fields, error)
