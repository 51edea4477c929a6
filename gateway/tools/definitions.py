"""The tools that a request offers, and whether they may, must or must not be called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from expertmesh.errors import RequestError
from gateway.generation_options import shown

MAX_TOOLS = 512

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema of its arguments."""

    def definition(self) -> dict[str, object]:
        """As chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


class Choice(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = Choice.NONE
    name: str | None = None
    """The tool to call, with NAMED."""
    parallel: bool = True
    """Several calls in one answer are fine."""
    param: str = "tools"
    """Path of the tools, for errors."""

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model is told of."""
        return () if self.choice is Choice.NONE else self.tools

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools."""
        return frozenset(tool.name for tool in self.tools)

    def schema_param(self, tool: Tool) -> str:
        """Path of the schema of a tool, for errors."""
        return f"{self.param}.{self.tools.index(tool)}.function.parameters"


def parse_tool_use(fields: Mapping[str, object]) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat request.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    tools = _tools(fields.get("tools"))
    choice, name = _choice(fields.get("tool_choice"), tools)
    parallel = optional_bool(fields.get("parallel_tool_calls"), "parallel_tool_calls")
    return ToolUse(tools, choice, name, parallel is not False)


def _tools(value: object) -> tuple[Tool, ...]:
    return make_tools(value, "tools", _function)


def make_tools(value: object, param: str, make: Callable[[object, str], Tool]) -> tuple[Tool, ...]:
    """Tools of an array, with distinct names.

    Args:
        value: The array, or None.
        param: Its path, for errors.
        make: Makes a tool of an entry and its path.

    Raises:
        RequestError: Names the entry that is wrong.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise RequestError(
            f"{param} is {shown(value)}; expected an array of 1 to {MAX_TOOLS} tools", param=param
        )
    tools = tuple(make(entry, f"{param}.{index}") for index, entry in enumerate(value))
    _check_distinct(tools, param)
    return tools


def _check_distinct(tools: Sequence[Tool], param: str) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            message = f"{param}.{index} has the name {shown(tool.name)} of another tool"
            raise RequestError(message, param=f"{param}.{index}")
        seen.add(tool.name)


def _function(entry: object, param: str) -> Tool:
    """A tool as the chat endpoint has it: `{"type": "function", "function": {...}}`."""
    fields = object_of(entry, param)
    check_function_type(fields, param)
    function = object_of(fields.get("function"), f"{param}.function")
    optional_bool(function.get("strict"), f"{param}.function.strict")
    return make_tool(function, f"{param}.function", schema_key="parameters")


def check_function_type(fields: Mapping[str, object], param: str) -> None:
    """Refuses tools that are no functions.

    Raises:
        RequestError: Names the type.
    """
    if fields.get("type") != "function":
        kind = fields.get("type")
        message = f"{param}.type is {shown(kind)}; this server has only tools of the type function"
        raise RequestError(message, param=f"{param}.type")


def make_tool(fields: Mapping[str, object], param: str, *, schema_key: str) -> Tool:
    """A tool of its name, description and schema.

    Args:
        fields: The object that holds them.
        param: Its path, for errors.
        schema_key: Name of the schema; absent, the tool has no arguments.

    Raises:
        RequestError: Names what is wrong.
    """
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{param}.name is {shown(name)}; expected 1 to 128 letters, digits, _, - and .",
            param=f"{param}.name",
        )
    if not isinstance(description, str | None):
        message = f"{param}.description is {shown(description)}; expected a string"
        raise RequestError(message, param=f"{param}.description")
    schema = fields.get(schema_key)
    empty: dict[str, object] = {"type": "object", "properties": {}}
    parameters = empty if schema is None else object_of(schema, f"{param}.{schema_key}")
    if parameters and parameters.get("type", "object") != "object":
        kind = parameters["type"]
        message = f"{param}.{schema_key}.type is {shown(kind)}; arguments are an object"
        raise RequestError(message, param=f"{param}.{schema_key}.type")
    return Tool(name, description or "", {"type": "object", **parameters})


def _choice(value: object, tools: Sequence[Tool]) -> tuple[Choice, str | None]:
    if value is None:
        return (Choice.AUTO if tools else Choice.NONE), None
    if value in (Choice.NONE, Choice.AUTO, Choice.REQUIRED) and isinstance(value, str):
        choice = Choice(value)
        if choice is Choice.REQUIRED and not tools:
            raise RequestError("tool_choice is required without tools", param="tool_choice")
        return (choice if tools else Choice.NONE), None
    if not isinstance(value, dict) or value.get("type") != "function":
        raise RequestError(
            f"tool_choice is {shown(value)}; expected none, auto, required, or an object of the "
            "type function with the name of a tool",
            param="tool_choice",
        )
    function = object_of(value.get("function"), "tool_choice.function")
    return Choice.NAMED, known_name(function.get("name"), tools, "tool_choice.function.name")


def known_name(value: object, tools: Sequence[Tool], param: str) -> str:
    """The name of one of the tools.

    Raises:
        RequestError: It is none.
    """
    if isinstance(value, str) and any(tool.name == value for tool in tools):
        return value
    raise RequestError(f"{param} is {shown(value)}, which is not one of the tools", param=param)


def object_of(value: object, param: str) -> Mapping[str, object]:
    """A value that must be an object.

    Raises:
        RequestError: It is none.
    """
    if isinstance(value, dict):
        return value
    what = "missing" if value is None else shown(value)
    raise RequestError(f"{param} is {what}; expected an object", param=param)


def optional_bool(value: object, param: str) -> bool | None:
    """A value that may be true, false or null.

    Raises:
        RequestError: It is something else.
    """
    if value is None or isinstance(value, bool):
        return value
    raise RequestError(f"{param} is {shown(value)}; expected true, false or null", param=param)
