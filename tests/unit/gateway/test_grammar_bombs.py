"""Grammars made to harm: each is refused or served, and costs nobody else much."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from attention_worker.grammar_matcher import GrammarMatcher
from expertmesh.deep_stack import DeepStackPool
from expertmesh.errors import RequestError
from gateway.structured import grammar
from gateway.structured.constraint import MAX_SOURCE_LEN, Constraint, Kind, parse_constraint
from gateway.structured.grammar import make_grammar
from tests.support.scripted_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = TOKENIZER.grammar_vocabulary
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _name(number: int) -> str:
    """Names of three letters: the shortest that are enough."""
    return "".join(_LETTERS[number // 26**place % 26] for place in range(3))


def _rules(count: int) -> Constraint:
    """Each rule is the next one: as many as fit."""
    rules = [f"{_name(index)}:{_name(index + 1)}" for index in range(count)]
    source = "\n".join(["start:aaa", *rules, f'{_name(count)}:"b"'])
    return Constraint(Kind.GRAMMAR, source, "structured_outputs.grammar")


def _references(count: int, through: str) -> Constraint:
    """Each schema is the next one."""
    definitions: dict[str, object] = {_name(count): {"type": "object"}}
    for index in range(count):
        target = {"$ref": f"#/$defs/{_name(index + 1)}"}
        definitions[_name(index)] = {through: [target]} if through else target
    source = json.dumps({"$ref": "#/$defs/aaa", "$defs": definitions})
    return Constraint(Kind.JSON_SCHEMA, source, "structured_outputs.json")


DEEP = {
    "rules": _rules(15_900),
    "references": _references(3_600, ""),
    "anyOf": _references(2_700, "anyOf"),
    "allOf": _references(2_700, "allOf"),
}
SLOW = {
    "optional letters": {"regex": "a?" * 12_000},
    "more of them": {"regex": "a?" * 60_000},
    "alternatives": {"grammar": "start: " + " | ".join(['"a"'] * 20_000)},
}
HOPELESS = {
    "itself": {"json": {"$ref": "#"}},
    "each other": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        | {"$ref": "#/$defs/a"}
    },
    "nothing": {"grammar": 'start: start "a"'},
}


def _make(constraint: Constraint) -> str:
    """As the gateway does."""
    with DeepStackPool(1, thread_name_prefix="compile") as pool:
        return pool.submit(make_grammar, constraint, TOKENIZER).result()


def _follow(constraint: Constraint) -> None:
    """Door and attention worker: whatever is taken can be used."""
    compiled = _make(constraint)

    def first_mask() -> None:
        matcher = GrammarMatcher(VOCABULARY, compiled, np.array([0]), TOKENIZER.vocab_size)
        assert matcher.allowed().any()

    with DeepStackPool(1, thread_name_prefix="grammar") as pool:
        pool.submit(first_mask).result()


def test_chains_of_rules_do_not_end_the_process() -> None:
    """The library recurses along them: a process of its own, since a fault would end this one."""
    assert min(len(constraint.source) for constraint in DEEP.values()) > MAX_SOURCE_LEN * 0.8
    script = "from tests.unit.gateway.test_grammar_bombs import follow_all; follow_all()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.decode().split() == list(DEEP)


def follow_all() -> None:
    """Each of the chains; refused or followed."""
    for name, constraint in DEEP.items():
        with contextlib.suppress(RequestError):
            _follow(constraint)
        sys.stdout.write(f"{name}\n")


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_to_compile_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step would wait for it, with all requests in it. Found out in bounded time."""
    monkeypatch.setattr(grammar, "MAX_CPU_S", 0.1)  # however fast this machine is
    constraint = parse_constraint({"structured_outputs": SLOW[name]})
    assert constraint is not None
    started_s = time.process_time()
    with pytest.raises(RequestError) as refused:
        _make(constraint)
    assert refused.value.param == constraint.param
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize("name", HOPELESS)
def test_what_no_output_can_match_is_refused_at_the_door(name: str) -> None:
    """Not by the attention worker, when the request has waited for its turn."""
    constraint = parse_constraint({"structured_outputs": HOPELESS[name]})
    assert constraint is not None
    with pytest.raises(RequestError) as refused:
        _make(constraint)
    assert refused.value.param == constraint.param
