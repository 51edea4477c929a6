"""Constraints to grammars as llguidance writes them, checked against the vocabulary of the model.

The library is loaded with the first constraint. It releases the interpreter lock while it checks.
What it takes may need more time to be made ready than all other requests of a step, and a step
waits for it; so the door makes it ready first, and refuses what took too long.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from expertmesh.errors import RequestError
from expertmesh.grammar_limits import grammar_limits
from gateway.service import GenerationFrontend
from gateway.structured.constraint import Constraint, Kind
from gateway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

_TIMEOUT_S = 10.0
"""Longest wait of a client, also for grammars of others before its own."""
MAX_CPU_S = 0.5
"""Longest time to make a grammar and its first mask ready; usual ones take a few milliseconds."""
_MAX_REASON_LEN = 300
JSON_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_pattern": r"( |\n[ \t]{0,32})?",
    "lenient": False,
}
"""Whitespace between the parts of JSON is enough for every usual layout, but bounded: a weak model
would write it for ever. What a schema says is obeyed or refused, never ignored."""


async def compile_constraint(frontend: GenerationFrontend, constraint: Constraint | None) -> str:
    """The grammar of a request; empty without a constraint.

    Args:
        frontend: Has the model, and threads for long work.
        constraint: What the output must match.

    Raises:
        RequestError: It cannot be used, or the model has no tokenizer.
    """
    if constraint is None:
        return ""
    tokenizer = frontend.model.tokenizer
    if tokenizer is None:
        raise _not_by_model(constraint, "has no tokenizer")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await frontend.run_in_grammar_thread(make_grammar, constraint, tokenizer)
    except TimeoutError:
        message = f"{constraint.param} was not ready within {_TIMEOUT_S:g} s"
        raise _refused(constraint, message) from None


def make_grammar(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """The grammar as a string that the attention worker understands; blocks.

    Call it in a thread of a `DeepStackPool`: the library recurses along chains of rules.

    Args:
        constraint: What the output must match.
        tokenizer: Of the model; grammars may name its special tokens.

    Raises:
        RequestError: It cannot be used; says why.
    """
    try:
        vocabulary = tokenizer.grammar_vocabulary  # made once: no grammar is charged for it
    except ValueError as error:
        raise _not_by_model(constraint, "has a tokenizer that grammars cannot use") from error
    started_s = time.thread_time()
    try:
        grammar = _WRITERS[constraint.kind](constraint)
    except Exception as error:  # the GBNF converter raises bare exceptions for what users wrote
        message = f"{constraint.param} cannot be read: {_readable(str(error))}"
        raise _refused(constraint, message) from error
    reason = _trial(grammar, vocabulary)
    if reason:
        raise _refused(constraint, f"{constraint.param} cannot be used: {_readable(reason)}")
    if time.thread_time() - started_s > MAX_CPU_S:
        message = (
            f"{constraint.param} is too complex: it takes more than {MAX_CPU_S:g} s to compile"
        )
        raise _refused(constraint, message)
    return grammar


def _trial(grammar: str, vocabulary: LLTokenizer) -> str:
    """Does what the attention worker will do first; returns why it cannot be done."""
    from llguidance import LLMatcher  # not at the start of the command line

    limits = grammar_limits()
    reason: str = LLMatcher.validate_grammar(grammar, vocabulary, limits=limits)
    if reason:
        return reason
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error().partition("\n<state>")[0] if matcher.is_error() else ""


def _of_schema(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(constraint.source, overrides=JSON_OPTIONS)


def _of_regex(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(constraint.source)


def _of_lark(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(constraint.source)


def _of_choices(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    choices = json.loads(constraint.source)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, choices)))


def _of_grammar(constraint: Constraint) -> str:
    """Lark as it is; GBNF and EBNF, known by their `::=`, are converted."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    return LLMatcher.grammar_from_lark(any_to_lark(constraint.source))


_WRITERS: dict[Kind, Callable[[Constraint], str]] = {
    Kind.JSON_SCHEMA: _of_schema,
    Kind.REGEX: _of_regex,
    Kind.CHOICE: _of_choices,
    Kind.GRAMMAR: _of_grammar,
    Kind.LARK: _of_lark,
}


def literal(text: str) -> str:
    """A text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _not_by_model(constraint: Constraint, why: str) -> RequestError:
    return RequestError(
        f"this model {why}, so {constraint.param} cannot be obeyed",
        param=constraint.param,
        code="unsupported_by_model",
    )


def _refused(constraint: Constraint, message: str) -> RequestError:
    return RequestError(message, param=constraint.param, code="invalid_grammar")


def _readable(reason: str) -> str:
    """What the library says, on one line and without an excerpt of the grammar."""
    words = " ".join(re.split(r"\n *\d+ \|", reason)[0].split())
    return words if len(words) <= _MAX_REASON_LEN else f"{words[:_MAX_REASON_LEN]}..."
