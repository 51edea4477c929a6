"""Which objects a request means: label selectors and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.support.kube.resources import Json, bad_request

Matches = Callable[[Json], bool]

_SET = re.compile(r"^(?P<key>\S+)\s+(?P<op>in|notin)\s+\((?P<values>[^)]*)\)$")
_EQUALS = re.compile(r"^(?P<key>[^=!\s]+)\s*(?P<op>==|=|!=)\s*(?P<value>\S*)$")
_EXISTS = re.compile(r"^(?P<not>!?)(?P<key>[A-Za-z0-9./_-]+)$")


def selector(labels: str, fields: str) -> Matches:
    """Of the query parameters `labelSelector` and `fieldSelector`; empty ones match all."""
    parts = [_of_labels(text) for text in _split(labels)]
    parts += [_of_field(text) for text in _split(fields)]
    return lambda item: all(part(item) for part in parts)


def matches_labels(wanted: dict[str, str], item: Json) -> bool:
    """Whether an object has all these labels, as the selector of a Service wants it."""
    return wanted.items() <= _labels(item).items()


def _split(text: str) -> list[str]:
    """At commas that are not within parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _labels(item: Json) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _of_labels(text: str) -> Matches:
    if found := _SET.match(text):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        return lambda item: (_labels(item).get(key) in values) == (found["op"] == "in")
    if found := _EQUALS.match(text):
        key, value, wanted = found["key"], found["value"], found["op"] != "!="
        return lambda item: (_labels(item).get(key) == value) == wanted
    if found := _EXISTS.match(text):
        return lambda item: (found["key"] in _labels(item)) != bool(found["not"])
    raise bad_request(f"unable to parse label selector {text!r}")


def _of_field(text: str) -> Matches:
    found = _EQUALS.match(text)
    if not found:
        raise bad_request(f"unable to parse field selector {text!r}")
    path, value, wanted = found["key"].split("."), found["value"], found["op"] != "!="

    def matches(item: Json) -> bool:
        part: Json | str | None = item
        for name in path:
            part = part.get(name) if isinstance(part, dict) else None
        return ((part or "") == value) == wanted

    return matches
