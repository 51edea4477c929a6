"""Prompts and conversations of requests to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from expertmesh.errors import ContextLengthError, RequestError
from gateway.generation_options import check_token_ids, shown
from gateway.openai.conversation import conversation_of
from gateway.openai.schema import ChatMessage, CommonRequest
from gateway.service import GenerationFrontend, ServedModel
from gateway.text.chat_template import USUAL, TemplateOptions, texts_in
from gateway.tools.definitions import Tool

T = TypeVar("T")
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt of /v1/completions."""

    token_ids: TokenIds
    text: str
    """As the client sent it, or the text of its tokens."""


@dataclass(frozen=True)
class Truncation:
    """Cuts prompts that are too long.

    Args:
        num_tokens: Tokens to keep; None keeps all.
        keep_end: Cut at the start.
    """

    num_tokens: int | None = None
    keep_end: bool = True

    def cut(self, token_ids: TokenIds) -> TokenIds:
        """The prompt, cut."""
        if self.num_tokens is None or len(token_ids) <= self.num_tokens:
            return token_ids
        return token_ids[-self.num_tokens :] if self.keep_end else token_ids[: self.num_tokens]


@dataclass(frozen=True)
class PromptOptions:
    """How the prompts of a call are encoded."""

    num_choices: int = 1
    """Choices for each prompt; each takes its place in the queue."""
    add_special_tokens: bool = True
    """Texts get the special tokens that the model expects."""
    echo: bool = False
    """The text of each prompt is needed."""
    truncation: Truncation = field(default_factory=Truncation)


def truncation_of(body: CommonRequest, model: ServedModel, requested: int | None) -> Truncation:
    """How a request wants its prompts cut; see `make_truncation`."""
    if body.truncate_prompt_tokens is None:
        return Truncation()
    keep_end = body.truncation_side != "right"
    return make_truncation(body.truncate_prompt_tokens, model, requested, keep_end=keep_end)


def make_truncation(
    wanted: int, model: ServedModel, requested: int | None, *, keep_end: bool = True
) -> Truncation:
    """A truncation that fits the model.

    Args:
        wanted: Tokens to keep; -1: as many as fit.
        model: For its context.
        requested: Tokens to generate that were asked for.
        keep_end: Cut at the start.

    Raises:
        RequestError: `truncate_prompt_tokens` is out of range.
    """
    if wanted == -1:
        return Truncation(max(1, model.max_model_len - max(requested or 1, 1)), keep_end)
    if not 1 <= wanted <= model.max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens is {wanted}; expected -1, or 1 to {model.max_model_len}, the "
            "context of this model",
            param="truncate_prompt_tokens",
        )
    return Truncation(wanted, keep_end)


_KEEP_ALL = Truncation()
_IN_THREAD_FROM = 4096
"""Characters from which a text is encoded outside the event loop."""


async def encode_chat(
    frontend: GenerationFrontend,
    messages: Sequence[ChatMessage],
    param: str = "messages",
    *,
    truncation: Truncation = _KEEP_ALL,
    tools: Sequence[Tool] = (),
    options: TemplateOptions = USUAL,
) -> TokenIds:
    """Token ids of a conversation.

    Args:
        frontend: For the chat template.
        messages: The conversation.
        param: Path of the parameter, for errors.
        truncation: How to cut what is too long.
        tools: What the model is told of.
        options: How the conversation becomes a prompt.

    Raises:
        RequestError: A message is not usable; names its index.
    """
    bounded = truncation.num_tokens is None
    ids = await encode_messages(
        frontend, messages, param, tools=tools, options=options, bounded=bounded
    )
    return truncation.cut(_usable(ids, frontend.model, param))


async def encode_messages(
    frontend: GenerationFrontend,
    messages: Sequence[ChatMessage],
    param: str = "messages",
    *,
    tools: Sequence[Tool] = (),
    options: TemplateOptions = USUAL,
    bounded: bool = False,
) -> list[int]:
    """Token ids of a conversation, which may be none.

    Args:
        frontend: For the chat template.
        messages: The conversation.
        param: Path of the parameter, for errors.
        tools: What the model is told of.
        options: How the conversation becomes a prompt.
        bounded: Refuse what cannot fit into the context, before it is encoded.

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
    conversation = conversation_of(messages, param)
    conversation, definitions = model.tool_format.prepare(conversation, tools)
    size = sum(map(len, texts_in([conversation, definitions])))
    if bounded:
        check_text_len(model, size, param)
    encode = partial(model.chat_template.encode, tools=definitions, options=options)
    return await _encode(frontend, size, encode, conversation)


async def encode_prompts(
    frontend: GenerationFrontend, prompt: object, options: PromptOptions
) -> list[TextPrompt]:
    """Each prompt of a call: a text, texts, token ids, or lists of token ids.

    Raises:
        RequestError: A prompt is not usable; names its index.
    """
    entries = _entries(prompt)
    limits, num_choices = frontend.limits, options.num_choices
    if len(entries) * num_choices > limits.max_prompts:
        what = f" with {num_choices} choices each" if num_choices > 1 else ""
        raise RequestError(
            f"prompt has {len(entries)} entries{what}; at most {limits.max_prompts} in a call",
            param="prompt",
        )
    size = sum(len(entry) for entry in entries if isinstance(entry, str))
    prompts = [await _encode_entry(frontend, entry, options, size) for entry in entries]
    check_together([prompt.token_ids for prompt in prompts], num_choices, limits.max_prompt_tokens)
    return prompts


def _entries(prompt: object) -> list[object]:
    """The prompts of a call: texts, or lists of what should be token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {shown(prompt)}; expected a string, an array of strings, an array of token "
            "ids, or an array of such arrays",
            param="prompt",
        )
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", code="empty_prompt")
    return prompt if isinstance(prompt[0], str | list) else [prompt]


def check_together(
    prompts: Sequence[TokenIds], num_choices: int, most: int, param: str = "prompt"
) -> None:
    """Refuses what the queue never takes; a client would repeat a 503 for ever.

    Raises:
        RequestError: The prompts of all choices together are too long.
    """
    num_tokens = num_choices * sum(map(len, prompts))
    if len(prompts) * num_choices > 1 and num_tokens > most:
        raise RequestError(
            f"{param} has {num_tokens} tokens in {len(prompts) * num_choices} choices; at most "
            f"{most} in a call",
            param=param,
        )


async def _encode_entry(
    frontend: GenerationFrontend, entry: object, options: PromptOptions, size: int
) -> TextPrompt:
    cut = options.truncation.cut
    if isinstance(entry, list):
        ids = check_token_ids(entry, frontend.model.config.vocab_size, "prompt")
        return _text_prompt(frontend.model, cut(ids), options)
    if not isinstance(entry, str):
        raise RequestError(
            f"prompt has the entry {shown(entry)}; expected only strings or only arrays of token "
            "ids",
            param="prompt",
        )
    ids = await encode_text(frontend, entry, "prompt", call_size=size, options=options)
    kept = cut(ids)
    if len(kept) == len(ids):
        return TextPrompt(ids, entry)
    return _text_prompt(frontend.model, kept, options)


def _text_prompt(model: ServedModel, token_ids: TokenIds, options: PromptOptions) -> TextPrompt:
    """A prompt whose text is that of its tokens."""
    if not options.echo or model.tokenizer is None:
        return TextPrompt(token_ids, "")
    return TextPrompt(token_ids, model.tokenizer.decode(token_ids, False))


_PLAIN = PromptOptions()


async def encode_text(
    frontend: GenerationFrontend,
    text: str,
    param: str,
    *,
    call_size: int = 0,
    options: PromptOptions = _PLAIN,
) -> TokenIds:
    """Token ids of a text, not cut.

    Args:
        frontend: For the tokenizer.
        text: The text.
        param: Path of the parameter, for errors.
        call_size: Characters of all texts of the call, if it has several.
        options: Which special tokens are added, and whether the prompt will be cut.

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
    if options.truncation.num_tokens is None:
        check_text_len(frontend.model, len(text), param)
    encode = partial(tokenizer.encode, add_special_tokens=options.add_special_tokens)
    ids = await _encode(frontend, max(len(text), call_size), encode, text)
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
