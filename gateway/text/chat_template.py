"""Conversations to token ids, with the chat template of the checkpoint.

The template is code from a model folder: it runs in jinja2's immutable sandbox and never comes
from a request. What users type is text: a special token spelled in a message is encoded letter by
letter, so that nobody can forge the border of a message.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expertmesh.errors import CheckpointError, EngineError, RequestError
from expertmesh.tokenizer_files import read_chat_template
from gateway.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_OWN_VARIABLES = frozenset(
    {*_TOKEN_VARIABLES, "messages", "add_generation_prompt", "tools", "documents"}
)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; "developer" is another word for "system"."""

Message = dict[str, Any]
"""A message for the template: role and content; "tool_calls" of an assistant; "tool_call_id" and
"name" of a result. Keys are the template's, all texts are a client's."""
Tools = Sequence[dict[str, Any]] | None
"""Definitions of tools for the template."""


@dataclass(frozen=True)
class TemplateOptions:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    """The prompt ends with the head of an answer."""
    continue_final_message: bool = False
    """The prompt ends with the content of the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """A client's variables for the template."""


USUAL = TemplateOptions()


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: Template text.
        tokenizer: For the special tokens and the encoding.

    Raises:
        ValueError: The template is not valid.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"not a valid chat template: {error}") from error
        tokens = tokenizer.special_tokens
        self.special_texts = tuple(token.content for token in tokens)
        self._border = _border_pattern(tokens)

    @classmethod
    def from_checkpoint(cls, model_dir: Path, tokenizer: Tokenizer | None) -> ChatTemplate | None:
        """The chat template of a model folder; None if it has none or no tokenizer.

        Raises:
            CheckpointError: The template is not valid.
        """
        source = read_chat_template(model_dir) if tokenizer is not None else None
        if source is None or tokenizer is None:
            return None
        try:
            return cls(source, tokenizer)
        except ValueError as error:
            raise CheckpointError(f"weights: {model_dir}: {error}") from error

    def render(
        self, messages: Sequence[Message], tools: Tools = None, options: TemplateOptions = USUAL
    ) -> str:
        """The prompt's text, ending where the answer begins.

        Raises:
            RequestError: The template refuses the conversation or the variables.
            EngineError: The template fails.
        """
        self._check_variables(options.variables)
        if not options.continue_final_message:
            return self._render_checked(messages, tools, options)
        end = _unused_letter(list(texts_in([messages, tools, options.variables])))
        last = {**messages[-1], "content": messages[-1]["content"] + end}
        text = self._render_checked([*messages[:-1], last], tools, options)
        head, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(
                "the chat template does not end with the content of the last message as it is",
                param="continue_final_message",
                code="unsupported_by_model",
            )
        return head

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuses to replace what the template gets from us."""
        for name in variables:
            if name in _OWN_VARIABLES or name in self._template.globals:
                param = "chat_template_kwargs"
                raise RequestError(f"{param} cannot have {name[:100]!r}", param=param)

    def _render_checked(
        self, messages: Sequence[Message], tools: Tools, options: TemplateOptions
    ) -> str:
        try:
            return self._render(messages, tools, options)
        except _RefusedError as error:
            raise RequestError(f"messages: {str(error)[:200]}", param="messages") from error
        except Exception as error:
            if options.variables:  # a template need not expect every value of them
                raise RequestError(
                    "the chat template fails with these variables", param="chat_template_kwargs"
                ) from error
            _log.exception("the chat template of the model failed")
            raise EngineError("the chat template of the model failed") from error

    def try_render(self, messages: Sequence[Message], tools: Tools = None) -> str | None:
        """The prompt's text; None if the template does not like the conversation."""
        try:
            return self._render(messages, tools, USUAL)
        except Exception as error:  # whatever code of a model folder may raise
            _log.debug("the chat template does not take a conversation: %r", error)
            return None

    def _render(self, messages: Sequence[Message], tools: Tools, options: TemplateOptions) -> str:
        variables = {role: self._tokenizer.special_token(role) for role in _TOKEN_VARIABLES}
        add_generation_prompt = options.add_generation_prompt and not options.continue_final_message
        return self._template.render(
            {
                **options.variables,
                **variables,
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "tools": None if tools is None else list(tools),
                "documents": None,
            }
        )

    def encode(
        self, messages: Sequence[Message], tools: Tools = None, options: TemplateOptions = USUAL
    ) -> list[int]:
        """Token ids of the prompt. Raises as `render` does."""
        typed = list(texts_in([messages, tools, options.variables]))
        if not any(self._spells_special(text) for text in typed):
            text = self.render(messages, tools, options)
            return self._tokenizer.encode(text, add_special_tokens=False)
        mark = _unused_letter(typed)
        marked_messages = [
            {key: self._marked(value, mark) for key, value in message.items()}
            for message in messages
        ]
        marked_tools = None if tools is None else [self._marked(tool, mark) for tool in tools]
        variables = {name: self._marked(value, mark) for name, value in options.variables.items()}
        marked = replace(options, variables=variables)
        return self._encode_marked(self.render(marked_messages, marked_tools, marked), mark)

    def _marked(self, value: Any, mark: str) -> Any:
        """A value with the mark in each of its texts, as `_mark_specials` puts it."""
        if isinstance(value, str):
            return self._mark_specials(value, mark)
        if isinstance(value, dict):
            return {
                self._marked(key, mark): self._marked(item, mark) for key, item in value.items()
            }
        return [self._marked(item, mark) for item in value] if isinstance(value, list) else value

    def _spells_special(self, content: str) -> bool:
        return any(True for _ in self._special_positions(content))

    def _special_positions(self, content: str) -> Iterable[int]:
        """Where a special token starts in a message, also one that its end only begins."""
        for text in self.special_texts:
            start = content.find(text)
            while start >= 0:
                yield start
                start = content.find(text, start + 1)
            for length in range(1, min(len(text), len(content) + 1)):
                if content.endswith(text[:length]):
                    yield len(content) - length

    def _mark_specials(self, content: str, mark: str) -> str:
        """Puts the mark behind the first letter of each special token, which breaks it."""
        pieces, end = [], 0
        for position in sorted(set(self._special_positions(content))):
            pieces += [content[end : position + 1], mark]
            end = position + 1
        return "".join([*pieces, content[end:]])

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encodes special tokens as such only where the mark does not break them."""
        ids: list[int] = []
        end = 0
        for found in self._border.finditer(text):
            if text.startswith(mark, found.end(found.lastindex or 0)):
                continue  # a special token of one letter, typed by a user
            ids += self._encode_text(text[end : found.start()], mark, first=not ids)
            token_id = self._tokenizer.token_id(found.group(found.lastindex or 0))
            assert token_id is not None, "special tokens are in the vocabulary"
            ids.append(token_id)
            end = found.end()
        return ids + self._encode_text(text[end:], mark, first=not ids)

    def _encode_text(self, text: str, mark: str, *, first: bool) -> list[int]:
        plain = text.replace(mark, "")
        return self._tokenizer.encode_plain(plain, first=first) if plain else []


class _RefusedError(Exception):
    """A template called raise_exception()."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the answer for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replaces the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to chat templates, and no more."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a nested value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(list(value))
        yield from texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _border_pattern(tokens: Sequence[Any]) -> re.Pattern[str]:
    """Finds special tokens as the tokenizer does: with the spaces that some of them absorb."""
    spaces = {True: r"\s*", False: ""}
    spellings = [
        f"{spaces[token.lstrip]}({re.escape(token.content)}){spaces[token.rstrip]}"
        for token in tokens
    ]
    return re.compile("|".join(spellings) if spellings else r"(?!)")


def _unused_letter(texts: Sequence[str]) -> str:
    """A private-use letter that occurs in none of the texts."""
    used = set().union(*map(set, texts))
    return next(letter for code in range(0xF0000, 0x10FFFE) if (letter := chr(code)) not in used)
