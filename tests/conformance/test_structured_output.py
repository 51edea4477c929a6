"""Output that must match a schema, an expression, a grammar or a list: on a model of random
weights, which would never write any of it by itself.
"""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator

from tests.support.api import Json
from tests.support.strict_client import CHAT, HELLO, TEXT, StrictClient, joined_chat

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["admin", "user"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}
FREE = {"ignore_eos": False, "max_tokens": 200}


def _content(answer: Json) -> str:
    assert answer["choices"][0]["finish_reason"] == "stop"
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_schema(client: StrictClient, temperature: float) -> None:
    """The answer is an instance of the schema, greedy or hot."""
    fields = {**FREE, "response_format": FORMAT, "temperature": temperature, "seed": 3}
    content = _content(client.chat(**fields))
    Draft202012Validator(PERSON).validate(json.loads(content))
    assert joined_chat(client.chat_stream(**fields)) == (content, "stop")


def test_json_object(client: StrictClient) -> None:
    """Some object; the length that a random model makes it may cut it."""
    answer = client.chat(**FREE, response_format={"type": "json_object"}, temperature=1, seed=1)
    choice = answer["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_text_is_no_constraint(client: StrictClient) -> None:
    """The format "text" changes nothing."""
    plain, text = client.chat(), client.chat(response_format={"type": "text"})
    assert plain["choices"][0]["message"] == text["choices"][0]["message"]


def test_choice(client: StrictClient) -> None:
    """One of the list, word by word."""
    words = ["positive", "negative"]
    for fields in ({}, {"temperature": 2, "seed": 5}):
        answer = client.complete(**{**FREE, **fields}, structured_outputs={"choice": words})
        assert answer["choices"][0]["text"] in words
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_regex(client: StrictClient) -> None:
    """The whole text matches."""
    pattern = r"[a-f]{3}-[0-9]{4}"
    answer = client.chat(**FREE, structured_outputs={"regex": pattern})
    assert re.fullmatch(pattern, _content(answer))


def test_grammar(client: StrictClient) -> None:
    """A grammar in Lark's notation."""
    grammar = 'start: "SELECT " COLUMN " FROM t"\nCOLUMN: /[a-c]/\n'
    answer = client.chat(**FREE, structured_outputs={"grammar": grammar})
    assert re.fullmatch(r"SELECT [a-c] FROM t", _content(answer))


def test_json_in_structured_outputs(client: StrictClient) -> None:
    """The same schema under vLLM's name for it, for both endpoints."""
    answer = client.complete("A person:", **FREE, structured_outputs={"json": PERSON})
    Draft202012Validator(PERSON).validate(json.loads(answer["choices"][0]["text"]))


def test_several_choices(client: StrictClient) -> None:
    """Each of n answers has a grammar of its own."""
    answer = client.chat(
        **FREE, n=2, temperature=1.5, seed=2, structured_outputs={"regex": r"[0-9]{12}"}
    )
    texts = {choice["message"]["content"] for choice in answer["choices"]}
    assert len(texts) == 2
    assert all(re.fullmatch(r"[0-9]{12}", text) for text in texts)


def test_truncated(client: StrictClient) -> None:
    """An answer that the limit cuts says so: clients must not parse it."""
    answer = client.chat(ignore_eos=False, max_tokens=3, response_format=FORMAT)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "poem"}}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"json": {"type": "object", "properties": {"a": {"type": "x"}}}}),
        ("structured_outputs", {"grammar": "start: ("}),
        ("structured_outputs", {"regex": "a", "json": {}}),
    ],
    ids=str,
)
def test_refused(client: StrictClient, path: str, param: str, value: Json) -> None:
    """A schema that is none fails its request alone, at once."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    error = client.refused(path, {**prompt, param: value})
    assert error["param"].split(".")[0] == param
