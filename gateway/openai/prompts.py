"""Prompts and conversations of requests to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from expertmesh.errors import ContextLengthError, RequestError, UnsupportedError
from gateway.chat_template import ROLES, Message
from gateway.generation_options import check_token_ids, shown
from gateway.openai.schema import ChatMessage, ContentPart
from gateway.service import GenerationFrontend, ServedModel

T = TypeVar("T")
TokenIds = tuple[int, ...]

_IN_THREAD_FROM = 4096
"""Characters from which a text is encoded outside the event loop."""


async def encode_chat(
    frontend: GenerationFrontend, messages: Sequence[ChatMessage], param: str = "messages"
) -> TokenIds:
    """Token ids of a conversation.

    Raises:
        RequestError: A message is not usable; names its index.
    """
    model = frontend.model
    if model.chat_template is None:
        what = "chat template" if model.tokenizer else "tokenizer"
        raise RequestError(
            f"this model has no {what}; send token ids as the prompt of /v1/completions",
            param=param,
            code="unsupported_by_model",
        )
    conversation = [_message(message, f"{param}.{i}") for i, message in enumerate(messages)]
    size = sum(len(message["content"]) for message in conversation)
    check_text_len(model, size, param)
    ids = await _encode(frontend, size, model.chat_template.encode, conversation)
    return _usable(ids, model, param)


async def encode_prompts(frontend: GenerationFrontend, prompt: object) -> list[TokenIds]:
    """Token ids of each prompt: a text, texts, token ids, or lists of token ids.

    Raises:
        RequestError: A prompt is not usable; names its index.
    """
    if isinstance(prompt, str):
        return [await encode_text(frontend, prompt, "prompt")]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {shown(prompt)}; expected a string, an array of strings, an array of token "
            "ids, or an array of such arrays",
            param="prompt",
        )
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", code="empty_prompt")
    if not isinstance(prompt[0], str | list):
        return [check_token_ids(prompt, frontend.model.config.vocab_size, "prompt")]
    if len(prompt) > (most := frontend.limits.max_prompts):
        raise RequestError(f"prompt has {len(prompt)} entries; at most {most}", param="prompt")
    size = sum(len(entry) for entry in prompt if isinstance(entry, str))
    prompts = [await _encode_entry(frontend, entry, size) for entry in prompt]
    _check_together(prompts, frontend.limits.max_prompt_tokens)
    return prompts


def _check_together(prompts: Sequence[TokenIds], most: int) -> None:
    """Refuses what the queue never takes; a client would repeat a 503 for ever."""
    num_tokens = sum(map(len, prompts))
    if len(prompts) > 1 and num_tokens > most:
        raise RequestError(
            f"prompt has {num_tokens} tokens in {len(prompts)} entries; at most {most} in a call",
            param="prompt",
        )


async def _encode_entry(frontend: GenerationFrontend, entry: object, size: int) -> TokenIds:
    if isinstance(entry, str):
        return await encode_text(frontend, entry, "prompt", call_size=size)
    if isinstance(entry, list):
        return check_token_ids(entry, frontend.model.config.vocab_size, "prompt")
    raise RequestError(
        f"prompt has the entry {shown(entry)}; expected only strings or only arrays of token ids",
        param="prompt",
    )


async def encode_text(
    frontend: GenerationFrontend, text: str, param: str, *, call_size: int = 0
) -> TokenIds:
    """Token ids of a text.

    Args:
        frontend: For the tokenizer.
        text: The text.
        param: Path of the parameter, for errors.
        call_size: Characters of all texts of the call, if it has several.

    Raises:
        RequestError: It is empty, far too long, or the model has no tokenizer.
    """
    tokenizer = frontend.model.tokenizer
    if tokenizer is None:
        raise RequestError(
            f"this model has no tokenizer; send {param} as token ids",
            param=param,
            code="unsupported_by_model",
        )
    if not text:
        raise RequestError(f"{param} is empty", param=param, code="empty_prompt")
    check_text_len(frontend.model, len(text), param)
    ids = await _encode(frontend, max(len(text), call_size), tokenizer.encode, text)
    return _usable(ids, frontend.model, param)


def _usable(ids: list[int], model: ServedModel, param: str) -> TokenIds:
    """The ids of a text. A tokenizer may have tokens that the model lacks, as added ones often
    are: such an id must not get into a step, which would fail for all requests in it.

    Raises:
        RequestError: There are none, or the model lacks one.
    """
    if not ids:
        raise RequestError(f"{param} has no tokens", param=param, code="empty_prompt")
    size = model.config.vocab_size
    if max(ids) >= size:
        unknown = next(token_id for token_id in ids if token_id >= size)
        raise RequestError(
            f"{param} has token {unknown} of the tokenizer, but the model knows only {size}",
            param=param,
            code="invalid_token_id",
        )
    return tuple(ids)


async def _encode(
    frontend: GenerationFrontend, size: int, encode: Callable[[T], list[int]], value: T
) -> list[int]:
    if size < _IN_THREAD_FROM:
        return encode(value)
    return await frontend.run_in_thread(encode, value)


def check_text_len(model: ServedModel, size: int, param: str) -> None:
    """Refuses a text that cannot fit, before the time is spent on encoding it.

    Raises:
        ContextLengthError: Even with the longest tokens it is over the context.
    """
    longest = model.tokenizer.max_token_len if model.tokenizer else None
    if longest is not None and size > longest * model.max_model_len:
        raise ContextLengthError(
            f"the context of this model is {model.max_model_len} tokens and {param}, with {size} "
            f"characters, has at least {-(-size // longest)}",
            param=param,
        )


def _message(message: ChatMessage, param: str) -> Message:
    """A message as the chat template sees it."""
    if message.role in ("tool", "function"):
        raise UnsupportedError(f"{param}.role: tools are not supported", param=f"{param}.role")
    if message.role not in ROLES:
        raise RequestError(
            f"{param}.role is {shown(message.role)}; expected one of {', '.join(ROLES)}",
            param=f"{param}.role",
        )
    if message.tool_calls:
        param = f"{param}.tool_calls"
        raise UnsupportedError(f"{param}: tools are not supported", param=param)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _content(message.content, f"{param}.content")}


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
