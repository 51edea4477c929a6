"""Typed, bounded reading of `config.json`: every number is checked before anyone multiplies it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from expertmesh.errors import CheckpointError

Json = dict[str, object]


@dataclass(frozen=True)
class ConfigReader:
    """Keys of a JSON object. A key that it leaves out has the family's default.

    A null counts as a missing value: it is refused, unless a method says otherwise. All methods
    raise CheckpointError naming file, key, value and expectation.
    """

    path: Path
    raw: Json
    prefix: str = ""
    """Dotted path of this object in the file, for messages."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that are not in the object."""

    def get(self, key: str) -> object:
        """The value of a key or its default; None if it is null or there is neither."""
        return self.raw[key] if key in self.raw else self.defaults.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; `default` takes the place of null."""
        value = self.optional_integer(key, low, high)
        if value is None:
            value = default
        if value is None:
            self.fail(key, f"an integer in [{low}, {high}]")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"an integer in [{low}, {high}]")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; `default` takes the place of null."""
        value = self.optional_number(key, low, high)
        if value is None:
            value = default
        if value is None:
            self.fail(key, f"a number in [{low:g}, {high:g}]")
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """A finite number in [low, high], or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"a number in [{low:g}, {high:g}]")
        if not math.isfinite(value) or not low <= value <= high:
            self.fail(key, f"a number in [{low:g}, {high:g}]")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """A boolean; `default` takes the place of null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string; `default` takes the place of null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str = "") -> str:
        """One of some strings; `default` takes the place of null."""
        value = self.text(key, default)
        if value not in choices:
            self.fail(key, f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0]))
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """An integer or a list of integers in [low, high]; empty for null."""
        value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                self.fail(key, f"integers in [{low}, {high}]")
        return tuple(values)

    def flags(self, key: str, length: int) -> tuple[bool, ...] | None:
        """A list of `length` zeros and ones, or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            self.fail(key, f"a list of {length} zeros and ones")
        if any(type(item) is not int or item not in (0, 1) for item in value):
            self.fail(key, f"a list of {length} zeros and ones")
        return tuple(item == 1 for item in value)

    def choices(self, key: str, length: int, choices: Sequence[str]) -> tuple[str, ...] | None:
        """A list of `length` strings, each one of some, or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            self.fail(key, f"a list of {length} entries")
        for item in value:
            if item not in choices:
                self.fail(key, f"{' or '.join(choices)} for each layer", found=item)
        return tuple(value)

    def child(self, key: str) -> ConfigReader | None:
        """A nested object, or None for null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return ConfigReader(self.path, value, f"{self.prefix}{key}.")

    def refuse(self, key: str, fix: str = "", *, unless: Sequence[object] = (None, False)) -> None:
        """Refuses a key whose values, but for these, would change what is computed."""
        value = self.get(key)
        if value not in unless:
            expected = " or ".join(json.dumps(other) for other in unless)
            self.fail(key, expected, fix=fix or "anything else is not supported")

    def fail(self, key: str, expected: str, fix: str = "", found: object = None) -> Never:
        """Reports a key.

        Args:
            key: In this object.
            expected: What its value has to be.
            fix: What the user can do.
            found: The part of the value that is wrong; the whole if None.
        """
        text = "nothing"
        if found is not None:
            text = repr(found)[:80]
        elif key in self.raw:
            text = repr(self.raw[key])[:80]
        elif key in self.defaults:
            text = f"{self.defaults[key]!r:.80} (the default)"
        raise CheckpointError(
            f"{self.path}: {self.prefix}{key}: expected {expected}, found {text}", fix=fix
        )
