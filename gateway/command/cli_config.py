"""The configuration file of the command line: YAML with the names of the flags as keys.

    port: 8000
    max-model-len: 1024
    experts: [10.0.0.5:50061, 10.0.0.6:50061]

It fills in what neither a flag nor the environment has set.
"""

from __future__ import annotations

import re
import reprlib
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Token

from expertmesh.errors import SettingsError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection
    from cyclopts.argument import Argument

_CONFIG = "--config"
_SECRET = ("--api-key",)
"""Flags whose values are in no message."""
_MAX_BYTES = 1_048_576
_WHOLE = re.compile(r"[+-]?[0-9]+")


def apply_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Gives each argument that has no value yet the one of the file named by `--config`.

    Raises:
        SettingsError: The file is unreadable, not a mapping, or has a key that the command lacks;
            names file and key.
    """
    by_name = {name: argument for argument in arguments for name in argument.names}
    config = by_name.get(_CONFIG)
    if config is None or not config.tokens:
        return
    path = Path(config.tokens[-1].value)
    for key, value in _read(path).items():
        argument = by_name.get(f"--{key.replace('_', '-')}")
        if argument is None or argument is config:
            known = sorted(name.removeprefix("--") for name in by_name if name.startswith("--"))
            raise SettingsError(
                f"unknown key {key!r} in {path}", fix=f"known keys are {', '.join(known)}"
            )
        if value is not None and not argument.tokens:
            _fill(argument, key, value, path)


def _fill(argument: Argument, key: str, value: object, path: Path) -> None:
    keyword = f"{key!r} in {path}"
    argument.append(Token(keyword=keyword, value=_as_text(value, keyword), source=str(path)))


def _as_text(value: object, keyword: str) -> str:
    """The value as one would write it on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and not any(isinstance(item, list) for item in value):
        return ",".join(_as_text(item, keyword) for item in value)
    if isinstance(value, str | int | float):
        return str(value)
    shown = reprlib.repr(value)  # short, even of a value that contains itself
    raise SettingsError(f"{keyword} is {shown}, expected one value or a list of them")


def check_texts(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuses bytes that are no text, which no message could carry, and 1.5 where a whole number
    is expected, which would be rounded.

    Raises:
        SettingsError: Names the setting and its value.
    """
    for argument in arguments:
        is_whole = int in (argument.hint, *typing.get_args(argument.hint))
        for token in argument.tokens:
            name = token.keyword or argument.name
            if not token.value.isascii() and token.value != _decodable(token.value):
                shown = "not shown" if argument.name in _SECRET else repr(token.value)
                raise SettingsError(f"{name} is {shown}, expected text in UTF-8")
            if is_whole and not _WHOLE.fullmatch(token.value):
                raise SettingsError(f"{name} is {token.value!r}, expected a whole number")


def _decodable(text: str) -> str:
    """The text with question marks for bytes that were not UTF-8."""
    return text.encode(errors="replace").decode()


def _read(path: Path) -> dict[str, object]:
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise SettingsError(f"configuration file {path} has more than {_MAX_BYTES} bytes")
        raw = yaml.safe_load(text)
    except OSError as error:
        raise SettingsError(f"cannot read configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"configuration file {path} is not YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise SettingsError(f"configuration file {path} must hold keys and values")
    return raw
