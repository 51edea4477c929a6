"""Typed, bounded reading of `config.json`: every number is checked before anyone multiplies it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from expertmesh.errors import CheckpointError


@dataclass(frozen=True)
class ConfigReader:
    """Keys of a JSON object. A null value counts as absent, as in transformers.

    All methods raise CheckpointError naming file, key, value and expectation.
    """

    path: Path
    raw: dict[str, object]
    prefix: str = ""
    """Dotted path of this object in the file, for messages."""

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; required if there is no default."""
        value = self.optional_integer(key, low, high)
        if value is None:
            value = default
        if value is None:
            self.fail(key, f"an integer in [{low}, {high}]")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None if absent."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"an integer in [{low}, {high}]")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; required if there is no default."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"a number in [{low:g}, {high:g}]")
        if not math.isfinite(value) or not low <= value <= high:
            self.fail(key, f"a number in [{low:g}, {high:g}]")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """An integer or a list of integers in [low, high]; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                self.fail(key, f"integers in [{low}, {high}]")
        return tuple(values)

    def child(self, key: str) -> ConfigReader | None:
        """A nested object, or None if absent."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return ConfigReader(self.path, value, f"{self.prefix}{key}.")

    def fail(self, key: str, expected: str, fix: str = "") -> Never:
        """Reports a key."""
        found = repr(self.raw[key])[:80] if key in self.raw else "nothing"
        raise CheckpointError(
            f"{self.path}: {self.prefix}{key}: expected {expected}, found {found}", fix=fix
        )
