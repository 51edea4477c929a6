"""What clients may send to the completion endpoints.

Unknown fields are ignored. Fields that are known but not supported are refused by name, unless they
hold the value that changes nothing: silently ignoring them would give a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from expertmesh.errors import ModelNotFoundError, RequestError, UnsupportedError
from gateway.generation_options import GenerationOptions, NumLogprobs, convert, shown
from gateway.service import ServedModel


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    """A last chunk with the usage of the whole call."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class CommonRequest(GenerationOptions, kw_only=True):
    """What both endpoints have."""

    model: str | None = None
    """Absent: the one that is served."""
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None


class ChatRequest(CommonRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Supersedes `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: Any
    logprobs: NumLogprobs | None = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "detokenize": (True,),
    "documents": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "return_routed_experts": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Known but unsupported: name to the values that change nothing, besides null."""

_NEUTRAL_IN_CHAT: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": (),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": (),
}


def parse_chat(body: Mapping[str, object], model: ServedModel) -> ChatRequest:
    """Body of /v1/chat/completions.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    _refuse_unsupported(body, _NEUTRAL | _NEUTRAL_IN_CHAT)
    request = convert(body, ChatRequest)
    _check_common(request, model)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request


def parse_completion(body: Mapping[str, object], model: ServedModel) -> CompletionRequest:
    """Body of /v1/completions.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    _refuse_unsupported(body, _NEUTRAL)
    request = convert(body, CompletionRequest)
    _check_common(request, model)
    return request


def _refuse_unsupported(body: Mapping[str, object], neutral: dict[str, tuple[object, ...]]) -> None:
    for name, value in body.items():
        if value is None or name not in neutral:
            continue
        if not any(_same(value, allowed) for allowed in neutral[name]):
            raise UnsupportedError(
                f"{name} is {shown(value)}, which this server does not support", param=name
            )


def _same(value: object, allowed: object) -> bool:
    """Equality of JSON values: true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _check_common(request: CommonRequest, model: ServedModel) -> None:
    check_model(request.model, model)
    if request.n is not None and request.n > 1:
        raise UnsupportedError(f"n is {request.n}; this server supports only 1", param="n")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")


def check_model(name: str | None, model: ServedModel) -> None:
    """Refuses the name of another model.

    Raises:
        ModelNotFoundError: It is not the one that is served.
    """
    if name is not None and name != model.name:
        raise ModelNotFoundError(
            f"the model {shown(name)} does not exist; this server has {shown(model.name)}"
        )
