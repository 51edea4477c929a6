"""Structured output at the door: every form of it, and every way to get it wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Literal

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from expertmesh.errors import RequestError
from gateway.structured.constraint import Constraint, Kind, parse_constraint
from gateway.structured.grammar import MAX_CPU_S, make_grammar
from gateway.text.tokenizer import Tokenizer
from tests.support.openai_calls import CHAT, HELLO, TEXT, post
from tests.support.scripted_engine import Gateway, byte_tokenizer, scripted_gateway

TOKENIZER = byte_tokenizer()
VOCABULARY = LLTokenizer(TOKENIZER.definition, eos_token=TOKENIZER.eos_ids[0])


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as running:
        yield running


def accepts(fields: dict[str, object], text: str) -> bool:
    """True if the grammar of a request allows a text, and allows the output to end there."""
    constraint = parse_constraint(fields)
    assert constraint is not None
    matcher = LLMatcher(VOCABULARY, make_grammar(constraint, TOKENIZER))
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def schema(value: object, **more: object) -> dict[str, object]:
    """`response_format` with a schema."""
    json_schema = {"name": "answer", "schema": value, **more}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def outputs(**kinds: object) -> dict[str, object]:
    """`structured_outputs`."""
    return {"structured_outputs": kinds}


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (schema(PERSON), '{"name": "Zoë", "age": 3}', '{"name": "Zoë"}'),
        (schema(PERSON, strict=True), '{"name":"a","age":3}', '{"name":"a","age":-1}'),
        (schema(PERSON, strict=False), '{\n  "name": "a",\n  "age": 3\n}', '{"name":1,"age":3}'),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        (outputs(json=PERSON), '{"name": "a", "age": 3}', '{"name": "a", "age": 3, "x": 1}'),
        (outputs(json=json.dumps(PERSON)), '{"name": "a", "age": 3}', "{}"),
        (outputs(json_object=True), "{}", "1"),
        (outputs(json_object=False, regex=r"\d{3}"), "123", "12"),
        (outputs(regex="[a-z]+/x\n?", json=None), "abc/x\n", "abc\n"),
        (outputs(choice=["yes", "no", "yes"]), "no", "nope"),
        (
            outputs(choice=['"', "\\", "\n", "\x00é\x7f\u2028\U0001f600"]),
            "\x00é\x7f\u2028😀",
            "\\n",
        ),
        (outputs(grammar='start: "a" /[0-9]+/'), "a17", "b17"),
        (outputs(grammar='root ::= "a" digit+\ndigit ::= [0-9]'), "a17", "a"),
        (outputs(grammar="start: %json " + json.dumps(PERSON)), '{"name":"","age":0}', "{}"),
    ],
)
def test_only_what_was_asked_for_can_come_out(
    fields: dict[str, object], good: str, bad: str
) -> None:
    """Each form becomes a grammar that allows what it should and nothing else."""
    assert accepts(fields, good)
    assert not accepts(fields, bad)


@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_text_can_be_a_choice(choices: list[str]) -> None:
    """Whatever letters choices are made of, exactly they can come out."""
    assert all(accepts(outputs(choice=choices), choice) for choice in choices)
    longer = max(choices, key=len) + "x"
    assert not accepts(outputs(choice=choices), longer)


def test_models_of_pydantic_can_be_used() -> None:
    """What openai's and pydantic's users send: references, literals, optionals, nested lists."""

    class Part(BaseModel):
        kind: Literal["wheel", "door"]
        weight: float | None = None

    class Car(BaseModel):
        name: str = Field(min_length=1, max_length=20)
        parts: list[Part]

    text = '{"name": "x", "parts": [{"kind": "door", "weight": 1.5}, {"kind": "wheel"}]}'
    assert accepts(schema(Car.model_json_schema()), text)
    assert not accepts(schema(Car.model_json_schema()), text.replace("door", "seat"))


def test_a_model_cannot_write_spaces_for_ever() -> None:
    """Between the parts of JSON, whitespace is bounded."""
    assert not accepts(schema(PERSON), '{"name": "a",' + " " * 40 + '"age": 3}')


@pytest.mark.parametrize("fields", [{}, {"response_format": None, "structured_outputs": None}])
def test_nothing_asked_for(fields: dict[str, object]) -> None:
    """Absent, null and text mean that anything may come out."""
    assert parse_constraint(fields) is None
    assert parse_constraint({**fields, "response_format": {"type": "text"}}) is None


FORMAT, OUTPUTS = "response_format", "structured_outputs"
BAD: list[tuple[dict[str, object], str]] = [
    *(({FORMAT: value}, FORMAT) for value in (5, "json_object", [], True)),
    *(({FORMAT: {"type": value}}, f"{FORMAT}.type") for value in (None, 1, "xml", {}, "JSON")),
    ({FORMAT: {}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": "{}"}}, f"{FORMAT}.json_schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{FORMAT}.json_schema.name"),
    *((schema(value), f"{FORMAT}.json_schema.schema") for value in (None, True, "{}", [], 1)),
    (schema({}, name=""), f"{FORMAT}.json_schema.name"),
    (schema({}, name="a b"), f"{FORMAT}.json_schema.name"),
    (schema({}, name="é" * 3), f"{FORMAT}.json_schema.name"),
    (schema({}, name="a" * 65), f"{FORMAT}.json_schema.name"),
    (schema({}, strict="yes"), f"{FORMAT}.json_schema.strict"),
    *(({OUTPUTS: value}, OUTPUTS) for value in (5, "a", [], {}, {"unknown": 1}, {"json": None})),
    (outputs(json={}, regex="a"), OUTPUTS),
    (outputs(json_object=False), OUTPUTS),
    (outputs(structural_tag="{}"), f"{OUTPUTS}.structural_tag"),
    *((outputs(json=value), f"{OUTPUTS}.json") for value in (1, "", "{", "[]", "[" * 9999, True)),
    *((outputs(regex=value), f"{OUTPUTS}.regex") for value in (1, "", ["a"], {"a": 1})),
    *((outputs(grammar=value), f"{OUTPUTS}.grammar") for value in (1, "", ["a"])),
    *((outputs(choice=value), f"{OUTPUTS}.choice") for value in ("ab", [], {}, ["a"] * 4097)),
    (outputs(choice=["a", 1]), f"{OUTPUTS}.choice.1"),
    (outputs(choice=["a", ""]), f"{OUTPUTS}.choice.1"),
    (outputs(json_object="yes"), f"{OUTPUTS}.json_object"),
    (outputs(regex="a" * 200_000), f"{OUTPUTS}.regex"),
    (outputs(choice=["a" * 100, "b" * 200_000]), f"{OUTPUTS}.choice"),
    ({**schema({}), **outputs(regex="a")}, OUTPUTS),
    *(({f"guided_{kind}": "a"}, f"guided_{kind}") for kind in ("json", "regex", "choice")),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str) -> None:
    """Each mistake gets an error that names its parameter."""
    with pytest.raises(RequestError) as caught:
        parse_constraint(fields)
    assert caught.value.param == param
    assert param in caught.value.message or "structural_tag" in caught.value.message


def test_old_parameters_have_a_pointer_to_the_new_ones() -> None:
    """Who sends guided_json is told what to send."""
    with pytest.raises(RequestError) as caught:
        parse_constraint({"guided_json": {}})
    assert "structured_outputs.json" in caught.value.message
    assert caught.value.code == "unsupported_parameter"


DEEP: dict[str, object] = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        (Kind.JSON_SCHEMA, '{"type": "foo"}', "foo"),
        (Kind.JSON_SCHEMA, '{"if": {}}', "if"),
        (Kind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (Kind.JSON_SCHEMA, '{"type": "object", "x-guidance": {"lenient": true}, "if": {}}', "if"),
        (Kind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        (Kind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}', "does not fetch"),
        (Kind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "regex"),
        (Kind.JSON_SCHEMA, '{"properties": 3}', "properties"),
        (Kind.JSON_SCHEMA, json.dumps(DEEP), "recursion"),
        (Kind.JSON_SCHEMA, json.dumps({"enum": [f"{i:08}" for i in range(100_000)]}), "too big"),
        (Kind.REGEX, "(", "unclosed"),
        (Kind.REGEX, r"(a)\1", "backreferences"),
        (Kind.REGEX, "(?=a)b", "look-around"),
        (Kind.REGEX, "(" * 9000 + "a" + ")" * 9000, "regex"),
        (Kind.GRAMMAR, "start: foo", "foo"),
        (Kind.GRAMMAR, "nonsense", ""),
        (Kind.GRAMMAR, "start: <|no_such_token|>", "unknown special token"),
        (Kind.GRAMMAR, "start: <[100000]>", "too large"),
        (Kind.GRAMMAR, 'root ::= "a', "line 1"),
        (Kind.GRAMMAR, "root ::= x", "x"),
        (Kind.GRAMMAR, "root ::= " + "(" * 9000, "recursion"),
    ],
)
def test_what_cannot_be_compiled_is_explained(kind: Kind, source: str, why: str) -> None:
    """A constraint that cannot be obeyed exactly is refused with the reason, shortly."""
    with pytest.raises(RequestError) as caught:
        make_grammar(Constraint(kind, source, "structured_outputs.x"), TOKENIZER)
    assert why in caught.value.message
    assert (caught.value.param, caught.value.code) == ("structured_outputs.x", "invalid_grammar")
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_grammar_reaches_the_engine(
    gateway: Gateway, session: aiohttp.ClientSession, path: str
) -> None:
    """Both endpoints hand the grammar on; without a constraint it is empty."""
    base = HELLO if path == CHAT else {"prompt": "hello"}
    assert (await post(session, gateway, path, base))[0] == 200
    status, _ = await post(session, gateway, path, {**base, **schema(PERSON)})
    assert status == 200
    constraint = parse_constraint(schema(PERSON))
    assert constraint is not None
    grammars = [request.params.grammar for request in gateway.engine.requests]
    assert grammars == ["", make_grammar(constraint, TOKENIZER)]


async def test_a_bad_schema_is_a_bad_request(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """The error has the envelope of every error, and nothing reaches the engine."""
    status, answer = await post(session, gateway, CHAT, {**HELLO, **schema({"not": {}})})
    assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
    assert answer["error"]["param"] == "response_format.json_schema.schema"
    assert gateway.engine.requests == []


async def test_a_model_without_tokenizer_says_so(session: aiohttp.ClientSession) -> None:
    """Grammars speak of letters: without a tokenizer they are refused by name."""
    async with scripted_gateway(tokenizer=False) as bare:
        body = {"prompt": [1, 2], "response_format": {"type": "json_object"}}
        status, answer = await post(session, bare, TEXT, body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")
    assert answer["error"]["param"] == "response_format"
    assert "tokenizer" in answer["error"]["message"]


def test_the_command_line_does_not_load_the_library() -> None:
    """llguidance is loaded by the first constraint, not by the start of the gateway."""
    code = "import sys, gateway.app, gateway.command.cli; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_grammar_is_not_charged_for_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large vocabulary takes longer to load than any grammar may take; both are no failure."""

    def load(tokenizer: Tokenizer) -> LLTokenizer:
        end_s = time.thread_time() + 1.2 * MAX_CPU_S
        while time.thread_time() < end_s:
            pass
        return VOCABULARY

    monkeypatch.setattr(Tokenizer, "grammar_vocabulary", property(load))
    constraint = parse_constraint(outputs(choice=["a", "b"]))
    assert constraint is not None
    assert make_grammar(constraint, byte_tokenizer())
