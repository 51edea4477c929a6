"""Tools of chat requests: what is offered, how the model is told, what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from llguidance import LLMatcher

from expertmesh.errors import RequestError
from gateway.structured.constraint import Constraint, parse_constraint
from gateway.structured.grammar import make_grammar
from gateway.tools.constraints import content_or_calls, tool_constraint
from gateway.tools.definitions import ToolUse, parse_tool_use
from gateway.tools.events import collect
from tests.support.openai_calls import CHAT, events, post
from tests.support.scripted_engine import Gateway, scripted_gateway
from tests.support.tool_requests import (
    ASK,
    CALL,
    CLOCK,
    TOKENIZER,
    VOCABULARY,
    function,
    use_of,
)
from tests.support.tool_templates import (
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN,
    tool_model,
)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server whose model writes calls as Hermes does."""
    async with scripted_gateway(model=tool_model()) as running:
        yield running


def prompt_of(gateway: Gateway) -> str:
    """The prompt of the latest request."""
    ids = gateway.engine.requests[-1].prompt_token_ids
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode()


async def test_a_call_is_found(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The answer has the call with an id, no content, and says that a call ended it."""
    gateway.engine.answer = CALL
    status, answer = await post(session, gateway, CHAT, ASK)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (
        200,
        "tool_calls",
        None,
    )
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"town": "Köln"}
    assert '"get_weather"' in prompt_of(gateway)
    assert gateway.engine.requests[-1].params.grammar == ""


async def test_no_call_is_an_ordinary_answer(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """With tools that the model does not use, the answer is that of a request without them."""
    gateway.engine.answer = "It rains. <b>"
    _, answer = await post(session, gateway, CHAT, ASK)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "It rains. <b>",
        "refusal": None,
        "annotations": [],
    }


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "return_token_ids": True}])
@pytest.mark.parametrize(
    "text", ["plain", CALL, f"First. {CALL} \n {CALL}\nLast", CALL[:50], "a <tool_call>x y"]
)
async def test_streams_say_the_same_as_whole_answers(
    gateway: Gateway, session: aiohttp.ClientSession, text: str, extra: dict[str, object]
) -> None:
    """Put together, the deltas are the message; no token and no log probability is lost."""
    gateway.engine.answer = text
    _, answer = await post(session, gateway, CHAT, {**ASK, **extra})
    found = await events(session, gateway, CHAT, {**ASK, **extra})
    (choice,) = answer["choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == (
        choice["message"]["content"] or ""
    )
    assert found[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    calls: list[dict[str, str]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["function"]["arguments"] == ""
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
    if extra:
        chunks = [chunk["choices"][0] for chunk in found]
        ids = [token for chunk in chunks for token in chunk.get("token_ids", ())]
        num_logprobs = sum(len((chunk["logprobs"] or {}).get("content", ())) for chunk in chunks)
        assert (ids, num_logprobs) == (choice["token_ids"], len(ids))


async def test_a_call_cut_by_the_limit_is_not_a_call(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """The finish reason of a truncated answer is length, even if it has the start of a call."""
    gateway.engine.answer = CALL
    _, answer = await post(session, gateway, CHAT, {**ASK, "max_tokens": 60})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"town"')


async def test_several_choices_have_calls_of_their_own(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Each choice is read by itself."""
    gateway.engine.answer = CALL
    _, answer = await post(session, gateway, CHAT, {**ASK, "n": 2})
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
    assert len(ids) == 2


async def test_tools_that_must_not_be_called_are_not_shown(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """tool_choice none: the model does not know of them, and what it says is content."""
    gateway.engine.answer = CALL
    _, answer = await post(session, gateway, CHAT, {**ASK, "tool_choice": "none"})
    assert answer["choices"][0]["message"]["content"] == CALL
    assert "get_weather" not in prompt_of(gateway)


async def test_a_named_tool_gives_its_arguments(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """The grammar is the tool's schema, and the text its arguments."""
    gateway.engine.answer = '{"town": "Rome"}'
    choice = {"type": "function", "function": {"name": "get_weather"}}
    _, answer = await post(session, gateway, CHAT, {**ASK, "tool_choice": choice})
    (found,) = answer["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    assert found["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"town": "Rome"}',
    }
    assert "Köln" in gateway.engine.requests[-1].params.grammar


async def test_a_required_call(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The grammar allows calls alone, and the text is read as such."""
    calls = [
        {"name": "get_weather", "arguments": {"town": "Rome"}},
        {"name": "clock", "arguments": {}},
    ]
    gateway.engine.answer = json.dumps(calls)
    _, answer = await post(session, gateway, CHAT, {**ASK, "tool_choice": "required"})
    (found,) = answer["choices"]
    names = [call["function"]["name"] for call in found["message"]["tool_calls"]]
    assert (found["finish_reason"], names) == ("tool_calls", ["get_weather", "clock"])
    assert accepts(use_of(tool_choice="required"), gateway.engine.answer)


def accepts(use: ToolUse, text: str) -> bool:
    """True if the grammar of tools that must be called allows a text."""
    constraint = tool_constraint(use)
    assert constraint is not None
    return matches(constraint, text)


def matches(constraint: Constraint, text: str) -> bool:
    """True if the grammar of a constraint allows a text."""
    matcher = LLMatcher(VOCABULARY, make_grammar(constraint, TOKENIZER))
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_grammars_of_calls_that_must_be_made() -> None:
    """Named: the arguments; required: one call, or an array of them; nothing else."""
    named = use_of(tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert accepts(named, '{"town":"Köln"}')
    assert not accepts(named, '{"town":"Bonn"}')
    one = use_of(tool_choice="required", parallel_tool_calls=False)
    call = '{"name": "get_weather", "arguments": {"town": "Köln"}}'
    assert accepts(one, call)
    assert not accepts(one, f"[{call}]")
    many = use_of(tool_choice="required")
    assert accepts(many, f"[{call}]")
    assert accepts(many, f'[{call}, {{"name": "clock", "arguments": {{}}}}]')
    for bad in ("[]", call, f"[{call},]", f"[{call.replace('Köln', 'x')}]", f"[{call}]x"):
        assert not accepts(many, bad)
    assert not accepts(many, "[" + ", ".join([call] * 33) + "]")
    assert tool_constraint(use_of()) is None


async def test_a_bad_schema_names_its_tool(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A schema that cannot be obeyed is refused where it must be obeyed."""
    function = {"name": "f", "parameters": {"type": "object", "not": {}}}
    body = {
        "messages": ASK["messages"],
        "tools": [CLOCK, {"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    status, answer = await post(session, gateway, CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
    assert answer["error"]["param"] == "tools.1.function.parameters"


BAD: list[tuple[dict[str, object], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [CLOCK] * 513}, "tools"),
    ({"tools": [CLOCK, 5]}, "tools.1"),
    ({"tools": [CLOCK, CLOCK]}, "tools.1"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": []}]}, "tools.0.function"),
    (function(name=None), "tools.0.function.name"),
    (function(name=""), "tools.0.function.name"),
    (function(name="a b"), "tools.0.function.name"),
    (function(name="a" * 129), "tools.0.function.name"),
    (function(name='f"}'), "tools.0.function.name"),
    (function(name="é"), "tools.0.function.name"),
    (function(description=5), "tools.0.function.description"),
    (function(strict=1), "tools.0.function.strict"),
    (function(parameters=[]), "tools.0.function.parameters"),
    (function(parameters="{}"), "tools.0.function.parameters"),
    (function(parameters={"type": "array"}), "tools.0.function.parameters.type"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": 1}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": ["auto"]}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "x"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str) -> None:
    """Each mistake gets an error that names its parameter."""
    with pytest.raises(RequestError) as caught:
        parse_tool_use(fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tool_choice": "auto"}])
def test_no_tools(fields: dict[str, object]) -> None:
    """Absent and null mean that there are none, whatever may be chosen of them."""
    use = parse_tool_use(fields)
    assert (use.offered, use.choice) == ((), "none")


ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("template", [HERMES, PLAIN])
def test_a_format_leaves_the_choice_of_tools(template: str) -> None:
    """With a format and tools, the output is content of the format, or calls as the model writes
    them; and calls are read as such."""
    model = tool_model(template)
    content = parse_constraint({"response_format": FORMAT})
    tags = model.tool_format.tags
    assert content is not None
    assert tags is not None
    call = '{"name": "get_weather", "arguments": {"town": "Köln"}}'
    call = f"<tool_call>\n{call}\n</tool_call>"
    calls = f"{call}\n{call}"
    many, one = use_of(), use_of(parallel_tool_calls=False)
    for use, good in ((many, [call, calls]), (one, [call])):
        constraint = content_or_calls(use, content, tags)
        assert matches(constraint, '{"ok": true}')
        assert all(matches(constraint, text) for text in good)
        for bad in ("hello", '{"ok": 1}', call.replace("Köln", "Bonn"), f'{call}{{"ok": true}}'):
            assert not matches(constraint, bad)
        for num, text in enumerate(good, start=1):
            reader = model.tool_format.reader(use)
            events = [*reader.push(text), *reader.finish()]
            assert len(collect(events).calls) == num
    assert not matches(content_or_calls(one, content, tags), calls)


async def test_formats_that_exclude_tools(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """What cannot be had together is refused by name; calls that must be made win."""
    schema = {**ASK, "response_format": FORMAT}
    assert (await post(session, gateway, CHAT, schema))[0] == 200
    assert '"ok"' in gateway.engine.requests[-1].params.grammar
    regex = {**ASK, "structured_outputs": {"regex": "a"}}
    status, answer = await post(session, gateway, CHAT, regex)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs.regex")
    status, _ = await post(session, gateway, CHAT, {**regex, "tool_choice": "required"})
    assert status == 200
    assert "get_weather" in gateway.engine.requests[-1].params.grammar
    for template in (MISTRAL, LLAMA):
        async with scripted_gateway(model=tool_model(template)) as other:
            status, answer = await post(session, other, CHAT, schema)
        assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")


@pytest.mark.parametrize("template", [HERMES, PLAIN])
async def test_the_client_of_openai_streams_tool_calls(template: str) -> None:
    """openai's own accumulation of a stream has the calls."""
    async with scripted_gateway(model=tool_model(template)) as running:
        running.engine.answer = f"Well. {CALL}"
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
            manager = client.chat.completions.stream(
                model="tiny", messages=ASK["messages"], tools=ASK["tools"]
            )
            async with manager as stream:
                async for _ in stream:
                    pass
                completion = await stream.get_final_completion()
        message = completion.choices[0].message
        assert message.content == "Well."
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.name == "get_weather"
        assert json.loads(message.tool_calls[0].function.arguments) == {"town": "Köln"}
        assert completion.choices[0].finish_reason == "tool_calls"
        assert '"clock"' in prompt_of(running)
