"""Structured output and tools from end to end: what comes out of a random model is what was asked
for, greedy and at temperature 1, alone and beside others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic.types import ToolParam
from pydantic import BaseModel, ConfigDict, Field

from tests.conftest import Models
from tests.support.api import Api
from tests.support.mesh import Server, serve
from tests.support.tiny_checkpoints import MIXTRAL_TEXT

ROOMY = replace(MIXTRAL_TEXT, max_positions=2048)
"""Tools need more room than the other tests have."""
CHAT = "/v1/chat/completions"
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    *({"temperature": 1, "seed": seed} for seed in range(3)),
]


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    """A mesh with a tiny model."""
    with serve(models.tiny(ROOMY, tokenizer=True)) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    """Its HTTP API."""
    return server.api


class Part(BaseModel):
    """A nested object with everything that can end."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["wheel", "door", "größe"]
    count: int = Field(ge=-3, le=100)
    ratio: bool | None


class Car(BaseModel):
    """The root."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    parts: list[Part] = Field(min_length=1, max_length=3)


def ask(api: Api, **fields: Any) -> Any:
    """The only choice of a chat."""
    body = {"messages": [{"role": "user", "content": "car?"}], "max_tokens": 1000, **fields}
    answer = api.post(CHAT, body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def schema_format(model: type[BaseModel]) -> dict[str, Any]:
    """`response_format` of a model."""
    schema = {"name": "answer", "schema": model.model_json_schema(), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize("way", WAYS)
def test_json_schema(api: Api, way: dict[str, Any]) -> None:
    """The output is JSON that validates, and ends by itself."""
    choice = ask(api, **schema_format(Car), **way)
    assert choice["finish_reason"] == "stop"
    Car.model_validate_json(choice["message"]["content"], strict=True)


@pytest.mark.parametrize("way", WAYS)
def test_choices_and_patterns(api: Api, way: dict[str, Any]) -> None:
    """One of the choices, a match of the pattern, a sentence of the grammar."""
    choices = ["yes", "no", "日本語", "maybe later"]
    found = ask(api, structured_outputs={"choice": choices}, **way)
    assert found["message"]["content"] in choices
    pattern = r"[a-f]{2,5}-\d{3}(é|🙂)?"
    found = ask(api, structured_outputs={"regex": pattern}, **way)
    assert re.fullmatch(pattern, found["message"]["content"])
    grammar = 'root ::= "<" [xy]+ ">" | "nothing"'
    found = ask(api, structured_outputs={"grammar": grammar}, **way)
    pattern = "<[xy]*" if found["finish_reason"] == "length" else "<[xy]+>|nothing"
    assert re.fullmatch(pattern, found["message"]["content"])


TOOLS = [
    {
        "type": "function",
        "function": {"name": "build", "parameters": Part.model_json_schema()},
    },
    {"type": "function", "function": {"name": "drive.now"}},
]


@pytest.mark.parametrize("way", WAYS)
def test_tools_that_must_be_called(api: Api, way: dict[str, Any]) -> None:
    """The arguments of a named tool, and of any one, validate."""
    named = {"type": "function", "function": {"name": "build"}}
    choice = ask(api, tools=TOOLS, tool_choice=named, **way)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "build"
    Part.model_validate_json(call["function"]["arguments"], strict=True)
    choice = ask(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **way)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    if call["function"]["name"] == "build":
        Part.model_validate_json(call["function"]["arguments"], strict=True)
    else:
        assert call["function"]["name"] == "drive.now"


@pytest.mark.parametrize("way", WAYS)
def test_a_format_beside_tools(api: Api, way: dict[str, Any]) -> None:
    """The model chooses between content of the format and calls; both validate."""
    choice = ask(api, tools=TOOLS[:1], parallel_tool_calls=False, **schema_format(Part), **way)
    message = choice["message"]
    if choice["finish_reason"] == "tool_calls":
        (call,) = message["tool_calls"]
        Part.model_validate_json(call["function"]["arguments"], strict=True)
    else:
        assert choice["finish_reason"] == "stop"
        Part.model_validate_json(message["content"], strict=True)


def test_several_calls(api: Api) -> None:
    """In parallel mode the output is at least one call, each of which is valid."""
    choice = ask(api, tools=TOOLS[:1], tool_choice="required", temperature=1, seed=5)
    calls = choice["message"]["tool_calls"]
    whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
    for call in whole:
        Part.model_validate_json(call["function"]["arguments"], strict=True)
    assert len({call["id"] for call in calls}) == len(calls) >= 1


def test_neighbours_make_no_difference(api: Api) -> None:
    """Requests with and without grammars at once give what each gives alone, also streamed."""
    bodies: list[dict[str, Any]] = [
        {**schema_format(Car), "temperature": 1, "seed": 7},
        {"temperature": 1, "seed": 7, "max_tokens": 40},
        {"structured_outputs": {"choice": ["a", "bb", "ccc"]}, "temperature": 1, "seed": 8},
        {"structured_outputs": {"regex": "[ab]{30}"}, "temperature": 1, "seed": 9},
    ]
    alone = [ask(api, **body)["message"]["content"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: ask(api, **body), bodies * 2))
    assert [choice["message"]["content"] for choice in together] == alone * 2
    hello = {"messages": [{"role": "user", "content": "car?"}], "max_tokens": 1000}
    events = list(api.stream(CHAT, {**hello, **bodies[0]}))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == alone[0]


def test_a_truncated_answer_says_so(api: Api) -> None:
    """The finish reason is length, so no client takes half a JSON text for a whole one."""
    choice = ask(api, **schema_format(Car), max_tokens=4, temperature=0)
    assert choice["finish_reason"] == "length"


def test_a_grammar_that_names_an_unknown_token_is_refused(api: Api) -> None:
    """What only the vocabulary can tell is a bad request as well."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "structured_outputs": {"grammar": 'start: "a" <|no_such_token|>'},
    }
    answer = api.post(CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_grammar")


def test_the_clients(server: Server) -> None:
    """openai's parse and Anthropic's tools give validated objects from the real thing."""
    url = f"http://127.0.0.1:{server.api.port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        model = client.models.list().data[0].id
        parsed = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "car?"}],
            response_format=Car,
            temperature=0,
        )
        assert isinstance(parsed.choices[0].message.parsed, Car)
        response = client.responses.parse(model=model, input="car?", text_format=Car, temperature=0)
        assert response.output_parsed == parsed.choices[0].message.parsed
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other:
        message = other.messages.create(
            model=model,
            max_tokens=500,
            messages=[{"role": "user", "content": "car?"}],
            tools=[
                ToolParam(name="build", input_schema={**Part.model_json_schema(), "type": "object"})
            ],
            tool_choice={"type": "tool", "name": "build"},
        )
    (block,) = message.content
    assert block.type == "tool_use"
    Part.model_validate(block.input, strict=True)
