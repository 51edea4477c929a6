"""Requests of /v1/messages to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from expertmesh.errors import RequestError, UnsupportedError
from gateway.generation_options import convert, shown
from gateway.openai.body import JsonObject
from gateway.openai.schema import refuse_unsupported
from gateway.responses.request import string_of, text_of
from gateway.tools.definitions import object_of

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
}
"""Known but unsupported: name to the values that change nothing, besides null."""

_PASSED_ON = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
    *("priority", "cache_salt", "timeout_s", "structured_outputs"),
)
"""The same in a chat request."""

_THOUGHTS = ("thinking", "redacted_thinking")


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens, as far as it differs from a chat."""

    messages: Annotated[list[Any], Meta(min_length=1, max_length=4096)]
    system: Any = None
    tools: Any = None
    tool_choice: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None


@dataclass
class ChatFields:
    """A chat request, and what its parameters are called in the client's request."""

    fields: JsonObject = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    """Of each message."""
    num_tools: int = 0

    def add(self, message: JsonObject, path: str) -> None:
        """Adds a message."""
        messages = self.fields.setdefault("messages", [])
        assert isinstance(messages, list), "made here"
        messages.append(message)
        self.paths.append(path)

    @property
    def renames(self) -> list[tuple[str, str]]:
        """Names in the chat request and in the client's."""
        messages = [(f"messages.{index}", path) for index, path in enumerate(self.paths)]
        tools = []
        for index in range(self.num_tools):
            tools += [
                (f"tools.{index}.function.parameters", f"tools.{index}.input_schema"),
                (f"tools.{index}.function", f"tools.{index}"),
            ]
        return [
            *messages,
            *tools,
            ("stop", "stop_sequences"),
            ("tool_choice.function", "tool_choice"),
            ("response_format.json_schema", "output_config.format"),
            ("response_format", "output_config.format"),
        ]


def parse_messages_request(body: Mapping[str, object]) -> MessagesRequest:
    """Body of /v1/messages.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    refuse_unsupported(body, _NEUTRAL)
    return convert(body, MessagesRequest)


def parse_count_request(body: Mapping[str, object]) -> CountRequest:
    """Body of /v1/messages/count_tokens. Raises as `parse_messages_request` does."""
    return convert(body, CountRequest)


def chat_fields(request: CountRequest, body: Mapping[str, object]) -> ChatFields:
    """The chat request that says the same.

    Args:
        request: The parsed body.
        body: The body.

    Raises:
        RequestError: A message or a tool is not usable.
    """
    chat = ChatFields({name: body[name] for name in _PASSED_ON if name in body})
    if request.system is not None:
        text = text_of(request.system, "system", ("text",))
        chat.add({"role": "system", "content": text}, "system")
    for index, message in enumerate(request.messages):
        param = f"messages.{index}"
        _add_message(chat, object_of(message, param), param)
    _check_end(request)
    _add_tools(chat, request)
    if isinstance(request, MessagesRequest):
        chat.fields["max_tokens"] = request.max_tokens
        chat.fields["stop"] = request.stop_sequences
        chat.fields["response_format"] = _format(body.get("output_config"))
    return chat


def _check_end(request: CountRequest) -> None:
    if request.messages[-1].get("role") == "assistant":
        param = f"messages.{len(request.messages) - 1}.role"
        raise UnsupportedError(
            f"{param} is assistant; this server cannot continue an answer, so the last message "
            "must be the user's",
            param=param,
        )


def _add_message(chat: ChatFields, message: Mapping[str, object], param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"{param}.role is {shown(role)}; expected user or assistant", param=f"{param}.role"
        )
    if isinstance(content, str):
        chat.add({"role": role, "content": content}, param)
        return
    if not isinstance(content, list) or not content:
        what = "missing" if content is None else shown(content)
        raise RequestError(
            f"{param}.content is {what}; expected a string or an array of blocks",
            param=f"{param}.content",
        )
    blocks = [
        (object_of(block, f"{param}.content.{index}"), f"{param}.content.{index}")
        for index, block in enumerate(content)
    ]
    add = _add_assistant if role == "assistant" else _add_user
    add(
        chat, str(role), [entry for entry in blocks if entry[0].get("type") not in _THOUGHTS], param
    )


Blocks = list[tuple[Mapping[str, object], str]]
"""Blocks of a message, each with its path."""


def _add_assistant(chat: ChatFields, role: str, blocks: Blocks, param: str) -> None:
    texts: list[str] = []
    calls: list[JsonObject] = []
    for block, path in blocks:
        match block.get("type"):
            case "text":
                texts.append(_text(block, path))
            case "tool_use":
                calls.append(_call(block, path))
            case kind:
                raise _unknown_block(kind, path, "text or tool_use")
    message: JsonObject = {"role": role, "content": "\n".join(texts)}
    chat.add({**message, "tool_calls": calls} if calls else message, param)


def _add_user(chat: ChatFields, role: str, blocks: Blocks, param: str) -> None:
    """Results of tools are messages of their own; what else the user says comes behind them."""
    texts: list[str] = []
    for block, path in blocks:
        match block.get("type"):
            case "text":
                texts.append(_text(block, path))
            case "tool_result":
                chat.add(_result(block, path), path)
            case kind:
                raise _unknown_block(kind, path, "text or tool_result")
    if texts:
        chat.add({"role": role, "content": "\n".join(texts)}, param)


def _unknown_block(kind: object, path: str, expected: str) -> RequestError:
    return RequestError(
        f"{path} has the type {shown(kind)}; expected {expected}",
        param=path,
        code="unsupported_content_type",
    )


def _text(block: Mapping[str, object], path: str) -> str:
    text = block.get("text")
    if isinstance(text, str):
        return text
    raise RequestError(f"{path}.text is {shown(text)}; expected a string", param=f"{path}.text")


def _call(block: Mapping[str, object], path: str) -> JsonObject:
    arguments = object_of(block.get("input"), f"{path}.input")
    function = {"name": string_of(block, "name", path), "arguments": arguments}
    return {"id": string_of(block, "id", path), "type": "function", "function": function}


def _result(block: Mapping[str, object], path: str) -> JsonObject:
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{path}.content", ("text",))
    if block.get("is_error") is True:
        text = f"Error: {text}"
    call_id = string_of(block, "tool_use_id", path)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _add_tools(chat: ChatFields, request: CountRequest) -> None:
    if isinstance(request.tools, list):
        tools = [_tool(entry, f"tools.{index}") for index, entry in enumerate(request.tools)]
        chat.num_tools = len(tools)
        chat.fields["tools"] = tools or None
    else:
        chat.fields["tools"] = request.tools
    if request.tool_choice is not None:
        choice = object_of(request.tool_choice, "tool_choice")
        chat.fields["tool_choice"] = _tool_choice(choice)
        chat.fields["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True


def _tool(entry: object, param: str) -> JsonObject:
    fields = object_of(entry, param)
    if fields.get("type") not in (None, "custom"):
        raise UnsupportedError(
            f"{param}.type is {shown(fields['type'])}; this server runs no tools of its own",
            param=f"{param}.type",
        )
    function = {
        "name": fields.get("name"),
        "description": fields.get("description"),
        "parameters": object_of(fields.get("input_schema"), f"{param}.input_schema"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, object]) -> object:
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
    raise RequestError(
        f"tool_choice.type is {shown(choice.get('type'))}; expected auto, any, tool or none",
        param="tool_choice.type",
    )


def _format(value: object) -> object:
    """The format of `output_config`: a JSON schema, which has no name here."""
    if value is None:
        return None
    config = object_of(value, "output_config")
    if config.get("format") is None:
        return None
    wanted = object_of(config["format"], "output_config.format")
    if wanted.get("type") != "json_schema":
        raise RequestError(
            f"output_config.format.type is {shown(wanted.get('type'))}; expected json_schema",
            param="output_config.format.type",
        )
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": wanted.get("schema")},
    }
