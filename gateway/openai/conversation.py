"""The messages of a chat request as a chat template sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from expertmesh.errors import RequestError, UnsupportedError
from gateway.generation_options import shown
from gateway.openai.schema import ChatMessage, ContentPart
from gateway.text.chat_template import ROLES, Message
from gateway.tools.definitions import check_function_type, object_of


def conversation_of(messages: Sequence[ChatMessage], param: str) -> list[Message]:
    """Messages with role and content, with tool calls and results where there are some.

    Raises:
        RequestError: A message is not usable; names its path.
    """
    conversation = [_message(entry, f"{param}.{index}") for index, entry in enumerate(messages)]
    _name_results(conversation)
    return conversation


def _message(message: ChatMessage, param: str) -> Message:
    if message.role == "function":
        raise UnsupportedError(
            f"{param}.role is function, which is not supported; send results with the role tool",
            param=f"{param}.role",
        )
    if message.role not in ROLES:
        raise RequestError(
            f"{param}.role is {shown(message.role)}; expected one of {', '.join(ROLES)}",
            param=f"{param}.role",
        )
    calls = _calls(message, f"{param}.tool_calls")
    if message.content is None and calls:
        content = ""
    else:
        content = _content(message.content, f"{param}.content")
    role = "system" if message.role == "developer" else message.role
    entry: Message = {"role": role, "content": content}
    if calls:
        entry["tool_calls"] = calls
    if role == "tool":
        entry |= _result(message, f"{param}.tool_call_id")
    return entry


def _result(message: ChatMessage, param: str) -> dict[str, Any]:
    """Which call a result belongs to."""
    if not message.tool_call_id:
        what = "missing" if message.tool_call_id is None else "empty"
        raise RequestError(f"{param} is {what}; expected the id of a tool call", param=param)
    named = {} if message.name is None else {"name": message.name}
    return {"tool_call_id": message.tool_call_id, **named}


def _name_results(conversation: Sequence[Message]) -> None:
    """Some templates want the tool's name with its result."""
    names: dict[str, str] = {}
    for message in conversation:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _calls(message: ChatMessage, param: str) -> list[dict[str, Any]]:
    if not message.tool_calls:
        return []
    if message.role != "assistant":
        raise RequestError(f"{param} belongs to messages of the role assistant", param=param)
    if not isinstance(message.tool_calls, list):
        what = shown(message.tool_calls)
        raise RequestError(f"{param} is {what}; expected an array", param=param)
    return [_call(entry, f"{param}.{index}") for index, entry in enumerate(message.tool_calls)]


def _call(value: object, param: str) -> dict[str, Any]:
    fields = object_of(value, param)
    if fields.get("type") is not None:
        check_function_type(fields, param)
    function = object_of(fields.get("function"), f"{param}.function")
    call_id = _text(fields, "id", param)
    name = _text(function, "name", f"{param}.function")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _text(fields: Mapping[str, object], key: str, param: str) -> str:
    value = fields.get(key)
    if isinstance(value, str) and value:
        return value
    what = "missing" if value is None else shown(value)
    raise RequestError(f"{param}.{key} is {what}; expected a string", param=f"{param}.{key}")


def _arguments(value: object, param: str) -> object:
    """Arguments as an object, which templates expect; as text if a model wrote no valid JSON."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise RequestError(f"{param} is {shown(value)}; expected a string of JSON", param=param)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _content(content: str | list[ContentPart] | None, param: str) -> str:
    """Text of a message; parts are joined by line ends."""
    if content is None:
        raise RequestError(f"{param} is null; expected a string or an array of parts", param=param)
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{param}.{index} has the type {shown(part.type)}; expected text",
                param=f"{param}.{index}",
                code="unsupported_content_type",
            )
    return "\n".join(part.text or "" for part in content)
