"""Requests of /v1/responses to chat requests.

What would need a store, or tools that run on the server, is refused by name.
"""

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
from gateway.tools.definitions import object_of

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Known but unsupported: name to the values that change nothing, besides null."""

_PASSED_ON = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls"),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens"),
    *("priority", "cache_salt", "timeout_s", "structured_outputs"),
)
"""The same in a chat request."""


class TextOptions(msgspec.Struct):
    """`text`."""

    format: Any = None
    verbosity: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/responses, as far as it differs from a chat."""

    input: Any
    """A text, or items."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    """Nothing is stored in any case, and the answer says so."""
    text: TextOptions | None = None
    tools: Any = None
    tool_choice: Any = None
    user: str | None = None


@dataclass
class ChatFields:
    """A chat request, and what its parameters are called in the client's request."""

    fields: JsonObject
    renames: list[tuple[str, str]] = field(default_factory=list)


def parse_response_request(body: Mapping[str, object]) -> ResponseRequest:
    """Body of /v1/responses.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    refuse_unsupported(body, _NEUTRAL)
    return convert(body, ResponseRequest)


def chat_fields(request: ResponseRequest, body: Mapping[str, object]) -> ChatFields:
    """The chat request that says the same.

    Args:
        request: The parsed body.
        body: The body.

    Raises:
        RequestError: An item of the input, or a tool, is not usable.
    """
    chat = ChatFields({name: body[name] for name in _PASSED_ON if name in body})
    conversation = _Conversation()
    if request.instructions is not None:
        conversation.add({"role": "system", "content": request.instructions}, "instructions")
    _add_input(conversation, request.input)
    chat.fields["messages"] = conversation.messages
    chat.fields["max_completion_tokens"] = request.max_output_tokens
    chat.fields["tools"] = _tools(request.tools)
    chat.fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None:
        chat.fields["response_format"] = _format(request.text.format)
    paths = enumerate(conversation.paths)
    chat.renames = [
        *((f"messages.{index}", path) for index, path in paths),
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("tool_choice.function", "tool_choice"),
        *((f"tools.{index}.function", f"tools.{index}") for index in _indices(request.tools)),
    ]
    return chat


def _indices(tools: object) -> range:
    return range(len(tools)) if isinstance(tools, list) else range(0)


class _Conversation:
    """Collects messages, and where each one came from."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.paths: list[str] = []

    def add(self, message: JsonObject, path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)

    def add_call(self, call: JsonObject, path: str) -> None:
        """Calls that follow each other, or a text of the assistant, are one message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": None}, path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list), "made here"
        calls.append(call)


def _add_input(conversation: _Conversation, value: object) -> None:
    if isinstance(value, str):
        conversation.add({"role": "user", "content": value}, "input")
        return
    if not isinstance(value, list) or not value:
        message = f"input is {shown(value)}; expected a string, or an array of items"
        raise RequestError(message, param="input")
    for index, item in enumerate(value):
        param = f"input.{index}"
        _add_item(conversation, object_of(item, param), param)


def _add_item(conversation: _Conversation, item: Mapping[str, object], param: str) -> None:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            conversation.add(_message(item, param), param)
        case "function_call":
            conversation.add_call(_call(item, param), param)
        case "function_call_output":
            conversation.add(_result(item, param), param)
        case "reasoning":
            pass  # the model has no use for what another one thought
        case _:
            raise UnsupportedError(
                f"{param}.type is {shown(kind)}; this server knows message, function_call and "
                "function_call_output",
                param=f"{param}.type",
            )


def _message(item: Mapping[str, object], param: str) -> JsonObject:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{param}.role is {shown(role)}; expected one of {', '.join(_ROLES)}",
            param=f"{param}.role",
        )
    return {"role": role, "content": text_of(item.get("content"), f"{param}.content")}


def _call(item: Mapping[str, object], param: str) -> JsonObject:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        message = f"{param}.arguments is {shown(arguments)}; expected a string of JSON"
        raise RequestError(message, param=f"{param}.arguments")
    function = {"name": string_of(item, "name", param), "arguments": arguments}
    return {"id": string_of(item, "call_id", param), "type": "function", "function": function}


def _result(item: Mapping[str, object], param: str) -> JsonObject:
    return {
        "role": "tool",
        "tool_call_id": string_of(item, "call_id", param),
        "content": text_of(item.get("output"), f"{param}.output"),
    }


def string_of(fields: Mapping[str, object], key: str, param: str) -> str:
    """A field that must be a string, not empty.

    Raises:
        RequestError: It is not.
    """
    value = fields.get(key)
    if isinstance(value, str) and value:
        return value
    what = "missing" if value is None else shown(value)
    raise RequestError(f"{param}.{key} is {what}; expected a string", param=f"{param}.{key}")


def text_of(
    value: object, param: str, kinds: tuple[str, ...] = _TEXT_PARTS, refusals: str = "refusal"
) -> str:
    """A text, or parts that are texts, joined by line ends.

    Raises:
        RequestError: It is something else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        what = "missing" if value is None else shown(value)
        message = f"{param} is {what}; expected a string or an array of parts"
        raise RequestError(message, param=param)
    texts = []
    for index, part in enumerate(value):
        fields = object_of(part, f"{param}.{index}")
        kind = fields.get("type")
        text = fields.get("text" if kind != refusals else refusals)
        if kind not in (*kinds, refusals) or not isinstance(text, str):
            raise RequestError(
                f"{param}.{index} has the type {shown(kind)}; expected {kinds[0]}",
                param=f"{param}.{index}",
                code="unsupported_content_type",
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(value: object) -> object:
    """Tools as a chat has them; what is no array is refused there."""
    if not isinstance(value, list):
        return value
    return [_tool(entry) for entry in value] or None  # an empty array means none here


def _tool(entry: object) -> object:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        return entry
    return {"type": "function", "function": {k: v for k, v in entry.items() if k != "type"}}


def _tool_choice(value: object) -> object:
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {"name": value.get("name")}}


def _format(value: object) -> object:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {
        "type": "json_schema",
        "json_schema": {k: v for k, v in value.items() if k != "type"},
    }
