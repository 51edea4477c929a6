"""`response_format` and `structured_outputs` of a request to one constraint on its output.

Only the shape is checked here; whether a schema, a regular expression or a grammar can be used is
known when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from expertmesh.errors import RequestError, UnsupportedError
from gateway.generation_options import shown

MAX_SOURCE_LEN = 128 * 1024
"""Characters of a schema, a regular expression or a grammar."""
MAX_CHOICES = 4096

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LEGACY = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "json",
    "guided_decoding_backend": "json",
}
"""Old parameters, and what takes their place in `structured_outputs`."""


class Kind(StrEnum):
    """How the source of a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    LARK = "lark"
    """As GRAMMAR, but made here."""


@dataclass(frozen=True)
class Constraint:
    """What the whole output must match."""

    kind: Kind
    source: str
    """The schema as JSON, the pattern, the choices as a JSON array, or the grammar."""
    param: str
    """Path of the parameter, for errors."""


def parse_constraint(fields: Mapping[str, object]) -> Constraint | None:
    """The constraint of a request; None if anything may come out.

    Args:
        fields: The body of the request.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    _refuse_legacy(fields)
    by_format = _from_response_format(fields.get("response_format"))
    by_kind = _from_structured_outputs(fields.get("structured_outputs"))
    if by_format is not None and by_kind is not None:
        raise RequestError(
            "structured_outputs and response_format both say what the output must match; send one",
            param="structured_outputs",
        )
    return by_format or by_kind


def _refuse_legacy(fields: Mapping[str, object]) -> None:
    for name, successor in _LEGACY.items():
        if fields.get(name) is not None:
            message = f"{name} is not supported; send structured_outputs.{successor} instead"
            raise UnsupportedError(message, param=name)


def _from_response_format(value: object, param: str = "response_format") -> Constraint | None:
    if value is None:
        return None
    fields = _object(value, param)
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return any_object(param)
        case "json_schema":
            return named_schema(fields.get("json_schema"), f"{param}.json_schema")
    raise RequestError(
        f"{param}.type is {shown(fields.get('type'))}; expected text, json_object or json_schema",
        param=f"{param}.type",
    )


def any_object(param: str) -> Constraint:
    """Any JSON object."""
    return Constraint(Kind.JSON_SCHEMA, '{"type": "object"}', param)


def named_schema(value: object, param: str) -> Constraint:
    """A JSON schema with a name, as OpenAI's endpoints have it.

    Raises:
        RequestError: Names what is missing or wrong.
    """
    fields = _object(value, param)
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{param}.name is {shown(name)}; expected 1 to 64 letters, digits, _ and -",
            param=f"{param}.name",
        )
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        message = f"{param}.strict is {shown(strict)}; expected true, false or null"
        raise RequestError(message, param=f"{param}.strict")
    schema = _object(fields.get("schema"), f"{param}.schema")
    return schema_constraint(schema, f"{param}.schema")


def schema_constraint(schema: Mapping[str, object], param: str) -> Constraint:
    """A JSON schema.

    Raises:
        RequestError: It is too long.
    """
    return _sized(Kind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), param)


def _from_structured_outputs(value: object, param: str = "structured_outputs") -> Constraint | None:
    if value is None:
        return None
    given = {name: entry for name, entry in _object(value, param).items() if _says(name, entry)}
    if "structural_tag" in given:
        message = "structural_tag is not supported"
        raise UnsupportedError(message, param=f"{param}.structural_tag")
    if len(given) != 1:
        found = f"has {', '.join(sorted(given))}" if given else f"is {shown(value)}"
        raise RequestError(
            f"{param} {found}; expected exactly one of {', '.join(_KINDS)}", param=param
        )
    ((name, entry),) = given.items()
    return _KINDS[name](entry, f"{param}.{name}")


def constraint_of(kind: str, value: object, param: str) -> Constraint:
    """A constraint of one kind.

    Args:
        kind: "json", "regex", "choice", "grammar" or "json_object".
        value: As in `structured_outputs`.
        param: Path of the parameter, for errors.

    Raises:
        RequestError: The value is wrong.
    """
    return _KINDS[kind](value, param)


def _says(name: str, entry: object) -> bool:
    """False for what changes nothing, and for fields that are unknown."""
    if name == "json_object" and entry is False:
        return False
    return entry is not None and (name in _KINDS or name == "structural_tag")


def _json(value: object, param: str) -> Constraint:
    if isinstance(value, str):
        _check_len(value, param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not JSON", param=param) from error
    return schema_constraint(_object(value, param), param)


def _regex(value: object, param: str) -> Constraint:
    return _sized(Kind.REGEX, _text(value, param), param)


def _grammar(value: object, param: str) -> Constraint:
    return _sized(Kind.GRAMMAR, _text(value, param), param)


def _choice(value: object, param: str) -> Constraint:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        message = f"{param} is {shown(value)}; expected an array of 1 to {MAX_CHOICES} strings"
        raise RequestError(message, param=param)
    for index, entry in enumerate(value):
        _text(entry, f"{param}.{index}")
    choices = list(dict.fromkeys(value))
    return _sized(Kind.CHOICE, json.dumps(choices, ensure_ascii=False), param)


def _json_object(value: object, param: str) -> Constraint:
    if value is not True:
        raise RequestError(f"{param} is {shown(value)}; expected true or false", param=param)
    return any_object(param)


_KINDS: dict[str, Callable[[object, str], Constraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}


def _object(value: object, param: str) -> Mapping[str, object]:
    if isinstance(value, dict):
        return value
    what = "missing" if value is None else shown(value)
    raise RequestError(f"{param} is {what}; expected an object", param=param)


def _text(value: object, param: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise RequestError(f"{param} is {shown(value)}; expected a string, not empty", param=param)


def _sized(kind: Kind, source: str, param: str) -> Constraint:
    _check_len(source, param)
    return Constraint(kind, source, param)


def _check_len(source: str, param: str) -> None:
    if len(source) > MAX_SOURCE_LEN:
        raise RequestError(
            f"{param} has {len(source)} characters; at most {MAX_SOURCE_LEN}", param=param
        )
