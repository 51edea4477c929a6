"""Tool calls that must be made, as constraints on the output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from expertmesh.errors import RequestError
from gateway.structured.constraint import (
    MAX_SOURCE_LEN,
    Constraint,
    Kind,
    schema_constraint,
)
from gateway.structured.grammar import JSON_OPTIONS, literal
from gateway.tools.definitions import Choice, Tool, ToolUse

MAX_CALLS = 32
"""Calls of one answer, where a grammar has to end somewhere."""
_MAX_LEN = 4 * MAX_SOURCE_LEN


def tool_constraint(use: ToolUse) -> Constraint | None:
    """What the output must match; None if tools need not be called.

    A named tool gives its arguments alone; otherwise a call is an object with name and arguments,
    and several are an array.

    Raises:
        RequestError: The schemas are too long.
    """
    if use.choice is Choice.NAMED:
        tool = next(tool for tool in use.tools if tool.name == use.name)
        return schema_constraint(tool.parameters, use.schema_param(tool))
    if use.choice is Choice.REQUIRED:
        return _any_call(use)
    return None


def content_or_calls(use: ToolUse, content: Constraint, tags: tuple[str, str]) -> Constraint:
    """JSON content, or calls as the model writes them by itself.

    Args:
        use: The tools.
        content: A JSON schema.
        tags: What stands before and behind a call, as parts of Lark rules.

    Raises:
        RequestError: The schemas are too long.
    """
    assert content.kind is Kind.JSON_SCHEMA, "others are no part of a rule"
    schema = _bounded(json.loads(content.source))
    one = f'{tags[0]} "\\n"? call "\\n"? {tags[1]}'
    more = f' ("\\n"? {one}){{0,{MAX_CALLS - 1}}}' if use.parallel else ""
    rules = ["start: content | calls", f"content: %json {schema}", f"calls: {one}{more}"]
    return _lark(use, [*rules, _call(use)])


_ARRAY = f'"[" call ("," " "? call){{0,{MAX_CALLS - 1}}} "]"'


def _any_call(use: ToolUse) -> Constraint:
    return _lark(use, [f"start: {_ARRAY if use.parallel else 'call'}", _call(use)])


def _lark(use: ToolUse, rules: Sequence[str]) -> Constraint:
    """Lark rather than one JSON schema: each schema keeps its own `$defs`."""
    source = "\n".join([*rules, *(_rules(i, tool) for i, tool in enumerate(use.tools))])
    if len(source) > _MAX_LEN:
        message = f"{use.param} have {len(source)} characters as a grammar; at most {_MAX_LEN}"
        raise RequestError(message, param=use.param)
    return Constraint(Kind.LARK, source, use.param)


def _call(use: ToolUse) -> str:
    return "call: " + " | ".join(f"call_{index}" for index in range(len(use.tools)))


def _rules(index: int, tool: Tool) -> str:
    head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    schema = _bounded(tool.parameters)
    return f'call_{index}: {head} arguments_{index} "}}"\narguments_{index}: %json {schema}'


def _bounded(schema: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
