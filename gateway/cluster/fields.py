"""Fields of JSON objects of another program: what is missing or of another type is empty."""

from __future__ import annotations

from collections.abc import Sequence

JsonObject = dict[str, object]


def at(value: object, *path: str) -> object:
    """What is at a path of keys; None if that ends early."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def text_at(value: object, *path: str) -> str:
    """Text at a path; empty if there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def number_at(value: object, *path: str) -> int:
    """A whole number at a path; 0 if there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) else 0


def flag_at(value: object, *path: str) -> bool | None:
    """True or false at a path; None if it is not said."""
    found = at(value, *path)
    return found if isinstance(found, bool) else None


def list_at(value: object, *path: str) -> Sequence[object]:
    """A list at a path; empty if there is none, or null."""
    found = at(value, *path)
    return found if isinstance(found, list) else ()
