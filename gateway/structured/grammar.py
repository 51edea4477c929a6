"""Constraints to grammars as llguidance writes them, checked against the vocabulary of the model.

The library is loaded with the first constraint. It releases the interpreter lock while it checks,
and gives up by itself on what is too large; the time limit here is for what its authors did not
think of.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from expertmesh.errors import RequestError
from gateway.service import GenerationFrontend
from gateway.structured.constraint import Constraint, Kind
from gateway.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_TIMEOUT_S = 10.0
"""Far longer than the most complex grammar that is accepted takes."""
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
            return await frontend.run_in_thread(make_grammar, constraint, tokenizer)
    except TimeoutError:
        message = f"{constraint.param} is too complex: it was not ready within {_TIMEOUT_S:g} s"
        raise _refused(constraint, message) from None


def make_grammar(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """The grammar as a string that the attention worker understands; blocks.

    Args:
        constraint: What the output must match.
        tokenizer: Of the model; grammars may name its special tokens.

    Raises:
        RequestError: It cannot be used; says why.
    """
    from llguidance import LLMatcher  # not at the start of the command line

    try:
        grammar = _WRITERS[constraint.kind](constraint)
    except Exception as error:  # the GBNF converter raises bare exceptions for what users wrote
        message = f"{constraint.param} cannot be read: {_readable(str(error))}"
        raise _refused(constraint, message) from error
    try:
        vocabulary = tokenizer.grammar_vocabulary
    except ValueError as error:
        raise _not_by_model(constraint, "has a tokenizer that grammars cannot use") from error
    reason = LLMatcher.validate_grammar(grammar, vocabulary)
    if reason:
        raise _refused(constraint, f"{constraint.param} cannot be used: {_readable(reason)}")
    return grammar


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
