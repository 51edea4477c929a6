"""What a generated text says: content and tool calls, in the order in which they come.

Every API makes its own objects of these events, whole or streamed.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextDelta:
    """More content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a tool call, as JSON text."""

    index: int
    text: str


Event = TextDelta | CallStart | CallArguments


@dataclass
class ToolCall:
    """A whole tool call."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """All events of an answer."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Message:
    """The message that events make together."""
    message = Message()
    for event in events:
        match event:
            case TextDelta():
                message.content += event.text
            case CallStart():
                message.calls.append(ToolCall(event.call_id, event.name))
            case CallArguments():
                message.calls[event.index].arguments += event.text
    return message


def long_id() -> str:
    """Id of a tool call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Id of a tool call of nine letters and digits, which templates of Mistral insist on."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


class EventWriter:
    """Takes letters as they are understood, and gives few events for them.

    Blank text next to a tool call is layout of the model's format; of text before and behind one, a
    line end is kept.

    Args:
        new_id: Makes ids of tool calls.
        max_calls: Further calls are left out; None for all.
    """

    def __init__(self, new_id: Callable[[], str] = long_id, max_calls: int | None = None) -> None:
        self._new_id = new_id
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._in_call = False
        self._num_seen = 0
        self._blank = ""
        """Trailing blanks of the content, which a tool call may follow."""
        self._after_call = False
        self._has_text = False

    @property
    def num_calls(self) -> int:
        """Tool calls so far, without those that are left out."""
        return self._num_seen if self._max_calls is None else min(self._num_seen, self._max_calls)

    def text(self, text: str) -> None:
        """Adds content."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        if self._after_call and self._has_text:
            text = f"\n{text}"
        self._after_call, self._has_text = False, True
        self._enter(in_call=False)
        text = self._blank + text
        certain = text.rstrip()
        self._blank = text[len(certain) :]
        self._pieces.append(certain)

    def start_call(self, name: str) -> None:
        """Begins a tool call."""
        self._enter(in_call=True)
        self._flush()
        self._blank = ""
        self._after_call = True
        self._num_seen += 1
        if not self._left_out:
            self._events.append(CallStart(self._num_seen - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the tool call that was begun last."""
        self._enter(in_call=True)
        if not self._left_out:
            self._pieces.append(text)

    def finish(self) -> None:
        """The text has ended."""
        if not self._num_seen:
            self._pieces.append(self._blank)
        self._blank = ""

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    @property
    def _left_out(self) -> bool:
        return self._max_calls is not None and self._num_seen > self._max_calls

    def _enter(self, *, in_call: bool) -> None:
        if self._in_call != in_call:
            self._flush()
            self._in_call = in_call

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text and self._in_call:
            self._events.append(CallArguments(self._num_seen - 1, text))
        elif text:
            self._events.append(TextDelta(text))
