"""Follows the JSON of tool calls letter by letter, while a model writes it.

A call is certain once its name is known and its arguments begin; from there on they are passed on
as they come. Until then every letter is held, so that text which turns out to be no call is lost
to nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum

from gateway.tools.events import EventWriter

BLANKS = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME_LEN = 256


class Step(Enum):
    """What a letter meant."""

    MORE = "the value goes on"
    LAST = "this letter ends it"
    BEFORE = "the letter before ended it"
    BAD = "this letter cannot follow"


class ValueScanner:
    """Finds the end of a JSON value: brackets and strings are checked, and no more."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._is_word = False

    def step(self, letter: str) -> Step:
        """Takes the next letter; the first one begins the value."""
        if self._in_string:
            return self._string(letter)
        if self._is_word:
            return self._word(letter)
        return self._structure(letter)

    def _string(self, letter: str) -> Step:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
            return Step.MORE if self._open else Step.LAST
        return Step.MORE

    def _word(self, letter: str) -> Step:
        if letter in ",]}" or letter in BLANKS:
            return Step.BEFORE
        return Step.MORE if letter.isalnum() or letter in "+-." else Step.BAD

    def _structure(self, letter: str) -> Step:
        if letter == '"':
            self._in_string = True
        elif letter in _CLOSING:
            self._open.append(_CLOSING[letter])
        elif letter in ("}", "]"):
            if not self._open or self._open.pop() != letter:
                return Step.BAD
            return Step.MORE if self._open else Step.LAST
        elif not self._open:
            self._is_word = letter.isalnum() or letter == "-"
            return Step.MORE if self._is_word else Step.BAD
        return Step.MORE


class CallScanner:
    """Follows one object with "name", and "arguments" or "parameters".

    Args:
        names: Tools that can be called; other names are no calls.
        writer: Takes the call.
        held: Letters that are not passed on yet; the caller's, so that it can add some before.
    """

    def __init__(self, names: frozenset[str], writer: EventWriter, held: list[str]) -> None:
        self._names = names
        self._writer = writer
        self._held = held
        self._next: Callable[[str], Step] = self._open
        self._value = ValueScanner()
        self._raw: list[str] = []
        """Letters of the key or value that is being read."""
        self._key = ""
        self._found: dict[str, str] = {}
        self._certain = False

    def step(self, letter: str) -> Step:
        """Takes the next letter: MORE, LAST or BAD. A bad letter is the last one held."""
        self._held.append(letter)
        return self._next(letter)

    def _open(self, letter: str) -> Step:
        self._next = self._first_key
        return Step.MORE if letter == "{" else Step.BAD

    def _first_key(self, letter: str) -> Step:
        return self._close() if letter == "}" else self._before_key(letter)

    def _before_key(self, letter: str) -> Step:
        if letter in BLANKS:
            return Step.MORE
        return self._begin(letter, self._in_key) if letter == '"' else Step.BAD

    def _begin(self, letter: str, state: Callable[[str], Step]) -> Step:
        self._value, self._raw, self._next = ValueScanner(), [], state
        return state(letter)

    def _in_key(self, letter: str) -> Step:
        self._raw.append(letter)
        step = self._value.step(letter)
        if step is not Step.LAST:
            return step
        self._key = _string_of("".join(self._raw)) or ""
        self._next = self._colon
        return Step.MORE

    def _colon(self, letter: str) -> Step:
        if letter in BLANKS:
            return Step.MORE
        self._next = self._before_value
        return Step.MORE if letter == ":" else Step.BAD

    def _before_value(self, letter: str) -> Step:
        if letter in BLANKS:
            return Step.MORE
        name = self._found.get("name")
        if letter == "{" and name and self._key in _ARGUMENT_KEYS and not self._certain:
            self._certain = True
            self._writer.start_call(name)
            return self._begin(letter, self._in_arguments)
        return self._begin(letter, self._in_value)

    def _in_arguments(self, letter: str) -> Step:
        step = self._value.step(letter)
        if step is Step.BAD:
            return step
        self._held.clear()
        self._writer.arguments(letter)
        if step is Step.LAST:
            self._next = self._after_value
        return Step.MORE

    def _in_value(self, letter: str) -> Step:
        step = self._value.step(letter)
        if step is not Step.BEFORE:
            self._raw.append(letter)
        if step in (Step.MORE, Step.BAD):
            return step
        if not self._take_value("".join(self._raw)):
            return Step.BAD
        self._next = self._after_value
        return self._after_value(letter) if step is Step.BEFORE else Step.MORE

    def _take_value(self, raw: str) -> bool:
        """False if the object cannot be a call."""
        if self._certain:
            return True
        if self._key == "name":
            name = _string_of(raw)
            if name is None or name not in self._names:
                return False
            raw = name
        self._found.setdefault(self._key, raw)
        return True

    def _after_value(self, letter: str) -> Step:
        if letter in BLANKS:
            return Step.MORE
        if letter == "}":
            return self._close()
        self._next = self._before_key
        return Step.MORE if letter == "," else Step.BAD

    def _close(self) -> Step:
        if self._certain:
            self._held.clear()
            return Step.LAST
        name = self._found.get("name")
        arguments = _arguments_of(self._found)
        if name is None or arguments is None:
            return Step.BAD
        self._held.clear()
        self._writer.start_call(name)
        self._writer.arguments(arguments)
        return Step.LAST


def _string_of(raw: str) -> str | None:
    """The string that JSON text stands for; None if it is none."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments_of(found: dict[str, str]) -> str | None:
    """The arguments of an object that ended: none mean {}, and a string may spell them."""
    raw = next((found[key] for key in _ARGUMENT_KEYS if key in found), "null")
    if raw == "null":
        return "{}"
    return raw if raw.startswith("{") else _string_of(raw)


class CallListScanner:
    """Follows one call, or an array of calls.

    Args: As for `CallScanner`.
    """

    def __init__(self, names: frozenset[str], writer: EventWriter, held: list[str]) -> None:
        self._names = names
        self._writer = writer
        self._held = held
        self._call: CallScanner | None = None
        self._in_array = False
        self._expects_call = True

    def step(self, letter: str) -> Step:
        """Takes the next letter: MORE, LAST or BAD. A bad letter is the last one held."""
        if self._call is not None:
            return self._in_call(letter)
        if letter == "{" and self._expects_call:
            self._call = CallScanner(self._names, self._writer, self._held)
            return self._call.step(letter)
        self._held.append(letter)
        return self._between(letter)

    def _in_call(self, letter: str) -> Step:
        assert self._call is not None, "called inside of a call only"
        step = self._call.step(letter)
        if step is not Step.LAST:
            return step
        self._call, self._expects_call = None, False
        return Step.MORE if self._in_array else Step.LAST

    def _between(self, letter: str) -> Step:
        if letter in BLANKS:
            return Step.MORE
        if letter == "[" and not self._in_array:
            self._in_array = True
            return Step.MORE
        if letter == "," and not self._expects_call:
            self._expects_call = True
            return Step.MORE
        if letter == "]" and not self._expects_call:
            self._held.clear()
            return Step.LAST
        return Step.BAD


class NamedCallScanner:
    """Follows a name with arguments behind it: `name{...}` or `name[ARGS]{...}`.

    Args: As for `CallScanner`.
    """

    def __init__(self, names: frozenset[str], writer: EventWriter, held: list[str]) -> None:
        self._names = names
        self._writer = writer
        self._held = held
        self._name: list[str] = []
        self._value: ValueScanner | None = None

    def step(self, letter: str) -> Step:
        """Takes the next letter: MORE, LAST or BAD. A bad letter is the last one held."""
        self._held.append(letter)
        if self._value is None:
            return self._in_name(letter)
        step = self._value.step(letter)
        if step is not Step.BAD:
            self._held.clear()
            self._writer.arguments(letter)
        return step

    def _in_name(self, letter: str) -> Step:
        if letter != "{":
            self._name.append(letter)
            return Step.MORE if len(self._name) <= _MAX_NAME_LEN else Step.BAD
        name, _, rest = "".join(self._name).partition("[")
        if name.strip() not in self._names or (rest and not rest.strip().endswith("ARGS]")):
            return Step.BAD
        self._writer.start_call(name.strip())
        self._value = ValueScanner()
        self._value.step(letter)
        self._held.clear()
        self._writer.arguments(letter)
        return Step.MORE
