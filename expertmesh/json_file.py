"""Reads JSON files that came from strangers: bounded, strict, one clear line on any fault."""

from __future__ import annotations

import json
from pathlib import Path

from expertmesh.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20
"""Far above the index of the largest public checkpoint (about 10 MB)."""


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, too large, not UTF-8, not strict JSON (NaN, duplicate
            keys and endless nesting included) or not an object.
    """
    try:
        value = json.loads(
            _read_text(path, max_bytes),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not valid JSON: {error}", fix="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: not a file", fix="check the path of the model folder")
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {max_bytes}")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not allowed")
