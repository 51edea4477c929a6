"""From generated text to content and tool calls, in the format that a model was trained on.

A reader belongs to one answer. It takes text in any pieces: every letter is a step, so pieces make
no difference. Text that is not a call after all, however much it looks like one, is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from gateway.text.detokenizer import StopStrings
from gateway.tools.events import Event, EventWriter, TextDelta
from gateway.tools.json_scan import (
    BLANKS,
    CallListScanner,
    CallScanner,
    NamedCallScanner,
    Step,
)


class Reader(Protocol):
    """Reads one answer."""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""

    def push(self, text: str) -> list[Event]:
        """Adds text; returns what became certain."""

    def finish(self) -> list[Event]:
        """The rest, at the end of the text."""


class PlainReader:
    """All text is content."""

    num_calls = 0

    def push(self, text: str) -> list[Event]:
        """The text itself."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing."""
        return []


class ArgumentsReader:
    """All text is the arguments of one tool, as a grammar takes care of.

    Args:
        name: The tool.
        writer: Takes the call.
    """

    def __init__(self, name: str, writer: EventWriter) -> None:
        self._name = name
        self._writer = writer

    @property
    def num_calls(self) -> int:
        """One, as soon as there is text."""
        return self._writer.num_calls

    def push(self, text: str) -> list[Event]:
        """More of the arguments."""
        if text and not self._writer.num_calls:
            self._writer.start_call(self._name)
        if text:
            self._writer.arguments(text)
        return self._writer.take()

    def finish(self) -> list[Event]:
        """Nothing."""
        return []


class _Scanner(Protocol):
    def step(self, letter: str) -> Step: ...


class LetterReader(ABC):
    """A reader that understands letter by letter.

    Args:
        names: Tools that can be called.
        writer: Takes what is understood.
    """

    def __init__(self, names: frozenset[str], writer: EventWriter) -> None:
        self._names = names
        self._writer = writer
        self._held: list[str] = []
        """Letters of what may be a call; content if it is none."""
        self._next: Callable[[str], None] = self._start

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._writer.num_calls

    def push(self, text: str) -> list[Event]:
        """Adds text; returns what became certain."""
        for letter in text:
            self._next(letter)
        return self._writer.take()

    def finish(self) -> list[Event]:
        """The rest: what might have become a call is content."""
        self._give_up()
        self._writer.finish()
        return self._writer.take()

    @abstractmethod
    def _start(self, letter: str) -> None:
        """Takes the first letter."""

    def _give_up(self) -> None:
        """What is held is content."""
        self._writer.text("".join(self._held))
        self._held.clear()


class MarkedReader(LetterReader):
    """Content with calls between markers.

    Args:
        names: Tools that can be called.
        writer: Takes what is understood.
        start: Marker before a call.
    """

    def __init__(self, names: frozenset[str], writer: EventWriter, start: str) -> None:
        super().__init__(names, writer)
        self._start_marker = start
        self._marker = StopStrings((start,))
        self._num_held = 0
        """Letters of what may be the marker."""
        self._scanner: _Scanner | None = None

    def push(self, text: str) -> list[Event]:
        """As for every reader; content up to the next letter that may begin a call is not looked
        at."""
        position = 0
        while position < len(text):
            if self._next == self._start and self._num_held == 0:
                begin = text.find(self._start_marker[0], position)
                begin = len(text) if begin < 0 else begin
                self._writer.text(text[position:begin])
                position = begin
            for letter in text[position : position + 1]:
                self._next(letter)
            position += 1
        return self._writer.take()

    def _start(self, letter: str) -> None:
        update = self._marker.push(letter)
        self._num_held += len(letter) - len(update.text)
        self._writer.text(update.text)
        if update.stop_reason is not None:
            self._enter_body()

    def _enter_content(self) -> None:
        self._marker = StopStrings((self._start_marker,))
        self._num_held = 0
        self._next = self._start

    def _enter_body(self) -> None:
        self._held.append(self._start_marker)
        self._scanner = None
        self._next = self._body

    def _body(self, letter: str) -> None:
        if self._scanner is None and letter in BLANKS:
            self._held.append(letter)
            return
        if self._scanner is None:
            self._scanner = self._make_scanner(letter)
        match self._scanner.step(letter):
            case Step.LAST:
                self._after_call()
            case Step.BAD:
                self._refuse()

    def _refuse(self) -> None:
        """It is no call; the letter that shows it may begin a marker."""
        letter = self._held.pop()
        self._give_up()
        self._enter_content()
        self._start(letter)

    @abstractmethod
    def _make_scanner(self, letter: str) -> _Scanner:
        """What follows a call that begins with this letter."""

    @abstractmethod
    def _after_call(self) -> None:
        """A call, or an array of calls, has ended."""

    def _give_up(self) -> None:
        super()._give_up()
        self._writer.text(self._marker.flush())


class HermesReader(MarkedReader):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Hermes and Qwen write."""

    START = "<tool_call>"
    END = "</tool_call>"

    def __init__(self, names: frozenset[str], writer: EventWriter) -> None:
        super().__init__(names, writer, self.START)
        self._end = StopStrings(())

    def _make_scanner(self, letter: str) -> _Scanner:
        return CallScanner(self._names, self._writer, self._held)

    def _after_call(self) -> None:
        self._end = StopStrings((self.END, self.START))
        self._next = self._after

    def _after(self, letter: str) -> None:
        update = self._end.push(letter)
        if update.text == letter == "{":  # another call without markers of its own
            self._scanner = None
            self._next = self._body
            self._body(letter)
            return
        self._writer.text(update.text)
        if update.stop_reason == self.END:
            self._enter_content()
        elif update.stop_reason == self.START:
            self._enter_body()


class MistralReader(MarkedReader):
    """`[TOOL_CALLS]` with an array of calls, or with a name and its arguments."""

    START = "[TOOL_CALLS]"

    def __init__(self, names: frozenset[str], writer: EventWriter) -> None:
        super().__init__(names, writer, self.START)

    def _make_scanner(self, letter: str) -> _Scanner:
        kind = CallListScanner if letter in "[{" else NamedCallScanner
        return kind(self._names, self._writer, self._held)

    def _after_call(self) -> None:
        self._enter_content()


class LeadingReader(LetterReader):
    """Calls as JSON, from the first letter of the answer on; otherwise all is content.

    Llama 3 writes so, with a tag before it at times and semicolons in between; and so does a model
    that a grammar obliges to call tools.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: frozenset[str], writer: EventWriter) -> None:
        super().__init__(names, writer)
        self._calls: CallListScanner | None = None

    def _start(self, letter: str) -> None:
        if self._calls is None and letter not in "[{":
            self._held.append(letter)
            if not self.TAG.startswith("".join(self._held).strip()):
                self._enter_content()
            elif "".join(self._held).strip() == self.TAG:
                self._next = self._between
            return
        self._step(letter)

    def _step(self, letter: str) -> None:
        if self._calls is None:
            self._calls = CallListScanner(self._names, self._writer, self._held)
        match self._calls.step(letter):
            case Step.LAST:
                self._calls = None
                self._next = self._between
            case Step.BAD:
                self._enter_content()
            case _:
                self._next = self._step

    def _between(self, letter: str) -> None:
        if letter in "[{":
            self._step(letter)
            return
        self._held.append(letter)
        if letter not in BLANKS + ";,":
            self._enter_content()

    def _enter_content(self) -> None:
        self._give_up()
        self._next = self._writer.text
