"""Tool calls that must be made, as constraints on the output."""

from __future__ import annotations

import json

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


def _any_call(use: ToolUse) -> Constraint:
    """Lark rather than one JSON schema: each schema keeps its own `$defs`."""
    source = "\n".join([_start(use), *(_rules(i, tool) for i, tool in enumerate(use.tools))])
    if len(source) > _MAX_LEN:
        message = f"{use.param} have {len(source)} characters as a grammar; at most {_MAX_LEN}"
        raise RequestError(message, param=use.param)
    return Constraint(Kind.LARK, source, use.param)


def _start(use: ToolUse) -> str:
    calls = " | ".join(f"call_{index}" for index in range(len(use.tools)))
    if not use.parallel:
        return f"start: {calls}"
    return f'start: "[" call ("," " "? call){{0,{MAX_CALLS - 1}}} "]"\ncall: {calls}'


def _rules(index: int, tool: Tool) -> str:
    head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    schema = json.dumps({**tool.parameters, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
    return f'call_{index}: {head} arguments_{index} "}}"\narguments_{index}: %json {schema}'
