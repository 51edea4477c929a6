"""What the parsers of `quantization_config` share."""

from __future__ import annotations

from collections.abc import Set

from expertmesh.families.config_reader import ConfigReader

MAX_NAMES = 1 << 16
MAX_BLOCK = 1 << 20
"""Rows or columns that share a scale."""


def refuse_unknown(reader: ConfigReader, known: Set[str]) -> None:
    """Refuses keys that may change what the weights are.

    Null and empty values count as absent.
    """
    for key in sorted(reader.raw.keys() - known):
        if reader.raw[key] not in (None, {}, [], ""):
            reader.fail(
                key,
                f"only the keys {', '.join(sorted(known))}",
                fix="remove it if it says nothing about how the weights are stored",
            )


def names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of strings; empty if absent."""
    value = reader.raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        reader.fail(key, f"a list of at most {MAX_NAMES} names")
    if not all(isinstance(item, str) and item for item in value):
        reader.fail(key, "a list of names")
    return tuple(value)
