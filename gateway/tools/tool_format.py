"""How a model is told of tools, and how it answers: its own way, or one that any model can follow.

A chat template that shows tools, calls and results, and whose format can be read, is used as it is.
For every other one a system message describes the tools and the format, and calls and results of
the conversation are put into plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from gateway.text.chat_template import ChatTemplate, Message
from gateway.tools.definitions import Choice, Tool, ToolUse
from gateway.tools.events import EventWriter, long_id, short_id
from gateway.tools.readers import (
    ArgumentsReader,
    HermesReader,
    LeadingReader,
    MistralReader,
    PlainReader,
    Reader,
)

_PROBE = "probe7f31"
_PROBE_TOOL = Tool(_PROBE, "", {"type": "object", "properties": {}})
_PROBE_RESULT = "result7f31"

ReaderType = type[HermesReader] | type[MistralReader] | type[LeadingReader]


class ToolFormat:
    """The format of one model.

    Args:
        template: Its chat template; None for a model without one.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    @cached_property
    def is_native(self) -> bool:
        """The chat template takes care of tools."""
        if self._template is None or self._reader_type_of(self._template.source) is None:
            return False
        return self._shows_tools(self._template) and self._shows_calls(self._template)

    @cached_property
    def needs_special_tokens(self) -> bool:
        """Special tokens mark calls, so they must be a part of the text."""
        markers = {
            HermesReader: HermesReader.START,
            MistralReader: MistralReader.START,
            LeadingReader: LeadingReader.TAG,
        }
        special = () if self._template is None else self._template.special_texts
        return markers[self._reader_type] in special

    @cached_property
    def tags(self) -> tuple[str, str] | None:
        """What stands before and behind a call, as parts of Lark rules.

        None where a rule cannot tell calls and JSON content apart, or cannot name the marker: Lark
        has special tokens of the form <...> alone.
        """
        if self._reader_type is not HermesReader:
            return None
        if self.needs_special_tokens:
            return HermesReader.START, HermesReader.END
        return json.dumps(HermesReader.START), json.dumps(HermesReader.END)

    def reader(self, use: ToolUse) -> Reader:
        """A reader for one answer."""
        if use.choice is Choice.NONE:
            return PlainReader()
        writer = EventWriter(self._new_id, None if use.parallel else 1)
        if use.name is not None:
            return ArgumentsReader(use.name, writer)
        if use.choice is Choice.REQUIRED:
            return LeadingReader(use.names, writer)
        return self._reader_type(use.names, writer)

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template."""
        definitions = [tool.definition() for tool in tools]
        if self.is_native:
            return self._liked(list(messages), definitions or None), definitions or None
        plain = _without_tool_messages(messages)
        if definitions:
            plain = self._described(plain, definitions)
        return plain, None

    def _liked(
        self, messages: list[Message], definitions: list[dict[str, Any]] | None
    ) -> list[Message]:
        """The messages in a form that the chat template takes: some want one call at a time."""
        if self._template is None or all(len(_calls_of(message)) < 2 for message in messages):
            return messages
        if self._template.try_render(messages, definitions) is not None:
            return messages
        single = _one_by_one(messages)
        return messages if self._template.try_render(single, definitions) is None else single

    @cached_property
    def _reader_type(self) -> ReaderType:
        if not self.is_native or self._template is None:
            return HermesReader
        return self._reader_type_of(self._template.source) or HermesReader

    @property
    def _new_id(self) -> Callable[[], str]:
        return short_id if self._reader_type is MistralReader else long_id

    @staticmethod
    def _reader_type_of(source: str) -> ReaderType | None:
        """What reads answers of models with this template; None if nothing does."""
        if (
            HermesReader.START in source
            and "<function=" not in source
            and "<arg_key>" not in source
        ):
            return HermesReader
        if MistralReader.START in source:
            return MistralReader
        if LeadingReader.TAG in source or ("ipython" in source and "parameters" in source):
            return LeadingReader
        return None

    @staticmethod
    def _shows_tools(template: ChatTemplate) -> bool:
        question = {"role": "user", "content": "?"}
        return _PROBE in (template.try_render([question], [_PROBE_TOOL.definition()]) or "")

    @staticmethod
    def _shows_calls(template: ChatTemplate) -> bool:
        function = {"name": _PROBE, "arguments": {}}
        call = {"id": "a1b2c3d4e", "type": "function", "function": function}
        conversation: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _PROBE_RESULT, "name": _PROBE, "tool_call_id": call["id"]},
        ]
        text = template.try_render(conversation, None) or ""
        return _PROBE in text and _PROBE_RESULT in text

    @cached_property
    def _has_system_role(self) -> bool:
        conversation = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        return self._template is not None and _PROBE in (
            self._template.try_render(conversation, None) or ""
        )

    def _described(
        self, messages: list[Message], definitions: Sequence[dict[str, Any]]
    ) -> list[Message]:
        """Puts the description of the tools first: into the system message, if there can be one."""
        text = _description(definitions)
        first = messages[0]
        role = "system" if self._has_system_role else "user"
        if first["role"] != role:
            return [{"role": role, "content": text}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


_DESCRIPTION = """You can use the following tools. Each line is the JSON of one of them, with a JSON
schema of its arguments:

{tools}

To use a tool, write its name and its arguments as JSON between two tags, like this:
{start}{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}{end}
Then stop; the results come with the next message. Answer without a tool if none is needed."""


def _description(definitions: Sequence[dict[str, Any]]) -> str:
    lines = (json.dumps(entry["function"], ensure_ascii=False) for entry in definitions)
    return _DESCRIPTION.format(
        tools="\n".join(lines), start=HermesReader.START, end=HermesReader.END
    )


def _calls_of(message: Message) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each call is followed by its own result."""
    results = {
        message["tool_call_id"]: message for message in messages if message["role"] == "tool"
    }
    placed: set[str] = set()
    single: list[Message] = []
    for message in messages:
        calls = _calls_of(message)
        if len(calls) < 2:
            if message.get("tool_call_id") not in placed:
                single.append(message)
            continue
        for index, call in enumerate(calls):
            content = message["content"] if index == 0 else ""
            single.append({**message, "content": content, "tool_calls": [call]})
            if call["id"] in results:
                single.append(results[call["id"]])
                placed.add(call["id"])
    return single


def _without_tool_messages(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; results that follow each other share a message of the user."""
    plain: list[Message] = []
    follows_result = False
    for message in messages:
        entry = _plain(message)
        is_result = message["role"] == "tool"
        if follows_result and entry["role"] == "user":
            entry = {"role": "user", "content": f"{plain.pop()['content']}\n{entry['content']}"}
        plain.append(entry)
        follows_result = is_result
    return plain


def _plain(message: Message) -> Message:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = _calls_of(message)
    lines = [content] if content else []
    lines += [_call_text(call["function"]) for call in calls]
    return {"role": role, "content": "\n".join(lines)} if calls else message


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{HermesReader.START}{json.dumps(call, ensure_ascii=False)}{HermesReader.END}"
