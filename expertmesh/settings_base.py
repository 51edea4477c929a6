"""What all settings classes have in common: JSON in both directions, checks of ranges.

Only the standard library and `expertmesh.errors` are imported, so that `--help` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Literal, Self

from expertmesh.errors import SettingsError


class Settings:
    """Base of the settings classes: JSON in both directions, strict."""

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(dataclasses.asdict(typing.cast("typing.Any", self)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. Raises SettingsError for unknown keys and wrong types."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"settings are not JSON: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: object, where: str = "") -> Self:
        """Settings of parsed JSON or YAML; absent keys take their default.

        Args:
            raw: A mapping with the names of the fields as keys.
            where: Dotted path of `raw`, for error messages.
        """
        value = _convert(raw, cls, where)
        assert isinstance(value, cls)
        return value


def check_host(value: str) -> None:
    """An empty variable of the environment must not open a server to every network."""
    if not value.strip() or value.startswith("["):
        raise SettingsError(
            f"host is {value!r}, expected a name or an address without brackets",
            fix="use 127.0.0.1 for this machine only, 0.0.0.0 or :: for every network",
        )


def check_port(name: str, value: int) -> None:
    """Raises SettingsError unless it is the number of a port, or 0."""
    check_int(name, value, 0, 65_535)


def check_int(name: str, value: int, low: int, high: int) -> None:
    """Raises SettingsError for a value outside of its range."""
    if not low <= value <= high:
        raise SettingsError(f"{name} is {value}, expected a whole number from {low} to {high}")


def check_float(name: str, value: float, low: float, high: float) -> None:
    """Raises SettingsError for a value outside of its range, or that is not finite."""
    if not (math.isfinite(value) and low <= value <= high):
        raise SettingsError(f"{name} is {value}, expected a number from {low:g} to {high:g}")


def _convert(raw: object, kind: object, where: str) -> object:
    """`raw` as `kind`: a settings class, a scalar, a Literal, or one of these or None."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _convert_dataclass(raw, kind, where)
    origin = typing.get_origin(kind)
    if origin is Literal:
        if raw in typing.get_args(kind):
            return raw
        choices = ", ".join(str(choice) for choice in typing.get_args(kind))
        raise SettingsError(f"{where} is {raw!r}, expected one of {choices}")
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return None if raw is None else _convert(raw, options[0], where)
    return _convert_scalar(raw, kind, where)


def _convert_dataclass(raw: object, kind: type, where: str) -> object:
    if not isinstance(raw, dict):
        raise SettingsError(f"{where or 'settings'} is {raw!r}, expected keys and values")
    kinds = typing.get_type_hints(kind)
    known = [entry.name for entry in dataclasses.fields(kind)]
    for key in raw:
        if key not in known:
            raise SettingsError(
                f"unknown setting {_join(where, str(key))}", fix=f"known are {', '.join(known)}"
            )
    return kind(**{key: _convert(raw[key], kinds[key], _join(where, key)) for key in raw})


def _convert_scalar(raw: object, kind: object, where: str) -> object:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    name = getattr(kind, "__name__", str(kind))
    raise SettingsError(f"{where} is {raw!r}, expected {_KIND_NAMES.get(name, name)}")


_KIND_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
