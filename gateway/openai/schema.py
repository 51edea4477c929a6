"""What clients may send to the completion endpoints.

Unknown fields are ignored. Fields that are known but not supported are refused by name, unless they
hold the value that changes nothing: silently ignoring them would give a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from expertmesh.errors import ModelNotFoundError, RequestError, UnsupportedError
from gateway.generation_options import GenerationOptions, NumLogprobs, convert, shown
from gateway.option_checks import check_routed_experts
from gateway.service import ServedModel
from gateway.text.chat_template import TemplateOptions

MAX_CHOICES = 128
_MAX_SALT_LEN = 128
SANE_ID = r"^[A-Za-z0-9._:+=-]{1,128}\Z"


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    """A last chunk with the usage of the whole call."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class CommonRequest(GenerationOptions, kw_only=True):
    """What both endpoints have."""

    model: str | None = None
    """Absent or empty: the one that is served, unless the server wants it named."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Choices for each prompt."""
    stream: bool | None = None
    """Answer in server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream has besides the text."""
    return_token_ids: bool | None = None
    """`token_ids` in each choice; `prompt_token_ids` in each of a completion and once in a chat."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens in log probabilities are spelled "token_id:N"."""
    prompt_logprobs: NumLogprobs | None = None
    """`prompt_logprobs`, in each choice of a completion and once in a chat: of the prompt's tokens,
    with so many candidates; not in a stream."""
    return_routed_experts: bool | None = None
    """`routed_experts` in each choice: base64 of a .npy with the experts of every token but the
    last, in every MoE layer."""
    routed_experts_prompt_start: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """`routed_experts` leaves out so many tokens of the prompt."""
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    """Lower goes first; default 0."""
    request_id: Annotated[str, Meta(pattern=SANE_ID)] | None = None
    """Becomes a part of the answer's id, and names the request in the gRPC method Abort."""
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    """The prefix cache is shared only with requests that have the same; without @ / \\ and NUL."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Only so many tokens of a longer prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """Where the prompt is cut; default left."""
    timeout_s: Annotated[float, Meta(gt=0, le=864_000)] | None = None
    """Seconds after which the request ends with the error 504."""


class ContentPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    """Of an assistant: the calls that it made."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    name: str | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    """The conversation, oldest first; content is a text, or an array of parts of the type text."""
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """As `max_tokens`, which it supersedes; default: all that fit into the context."""
    logprobs: bool | None = None
    """Log probabilities of the generated tokens."""
    top_logprobs: NumLogprobs | None = None
    """With so many of the most likely tokens; needs `logprobs`."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the head of an answer; default true."""
    continue_final_message: bool | None = None
    """The answer continues the last message."""
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    """Variables for the model's chat template, such as `enable_thinking`."""

    def template_options(self) -> TemplateOptions:
        """How the conversation becomes a prompt.

        Raises:
            RequestError: Two of the options exclude each other.
        """
        return template_options(
            self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs
        )


def template_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: Mapping[str, Any] | None,
) -> TemplateOptions:
    """How a conversation becomes a prompt; None means the default.

    Raises:
        RequestError: Two of the options exclude each other.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return TemplateOptions(
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        variables=variables or {},
    )


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: Any
    """A text, texts, token ids, or arrays of token ids."""
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Most tokens to generate; default 16; 0 is possible with `echo`."""
    logprobs: NumLogprobs | None = None
    """Log probabilities of the tokens, with so many of the most likely ones."""
    echo: bool | None = None
    """The prompt is a part of the text and of the log probabilities."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """The same as `n`: choices are not ranked."""
    add_special_tokens: bool | None = None
    """A text gets the special tokens that the model expects, such as one at the start; default
    true."""


NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "documents": (),
    "modalities": (["text"],),
    "logprob_token_ids": ([],),
    "prediction": (),
    "prompt_embeds": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Known but unsupported: name to the values that change nothing, besides null."""

NEUTRAL_IN_CHAT: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
}


def parse_chat(body: Mapping[str, object], model: ServedModel) -> ChatRequest:
    """Body of /v1/chat/completions.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    refuse_unsupported(body, NEUTRAL | NEUTRAL_IN_CHAT)
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
    refuse_unsupported(body, NEUTRAL)
    request = convert(body, CompletionRequest)
    _check_common(request, model)
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens is 0; expected at least 1 without echo", param="max_tokens")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise UnsupportedError(
            f"best_of is {request.best_of}; this server does not rank choices, so it must be n",
            param="best_of",
        )
    return request


def refuse_unsupported(body: Mapping[str, object], neutral: dict[str, tuple[object, ...]]) -> None:
    """Refuses known parameters by name, unless they have a value that changes nothing.

    Args:
        body: The request.
        neutral: Name to the values that change nothing, besides null.

    Raises:
        UnsupportedError: Names the first one.
    """
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
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs"
        )
    if request.cache_salt is not None:
        check_cache_salt(request.cache_salt)
    check_routed_experts(bool(request.return_routed_experts), model.config)


def check_cache_salt(salt: str, param: str = "cache_salt") -> None:
    """Refuses salts that could be mistaken for something else where they are stored.

    Raises:
        RequestError: It has @, /, \\ or NUL, or more than 128 characters.
    """
    if len(salt) > _MAX_SALT_LEN:
        raise RequestError(f"{param} is longer than {_MAX_SALT_LEN} characters", param=param)
    if any(letter in salt for letter in "@/\\\0"):
        raise RequestError(f"{param} has one of @ / \\ NUL", param=param)


def check_model(name: str | None, model: ServedModel) -> None:
    """Refuses the name of another model, and a missing name if the server wants one.

    Raises:
        ModelNotFoundError: It is not the one that is served.
        RequestError: It is missing.
    """
    if not name and model.name_required:
        raise RequestError(f"model is missing; this server has {shown(model.name)}", param="model")
    check_named_model(name, model)


def check_named_model(name: str | None, model: ServedModel) -> None:
    """Refuses the name of another model; none at all is fine.

    Raises:
        ModelNotFoundError: It is not the one that is served.
    """
    if name and name != model.name:
        raise ModelNotFoundError(
            f"the model {shown(name)} does not exist; this server has {shown(model.name)}"
        )
