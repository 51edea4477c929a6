"""Keys in a file, a key a line, which may change while they are accepted.

Owner: the event loop of the gateway, which reads a changed file in some milliseconds at most.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from expertmesh.errors import SettingsError
from gateway.file_stamp import stamp_of

logger = logging.getLogger("gateway")

LOOK_EVERY_S = 1.0
"""Between two looks whether a file has changed."""
MAX_KEYS = 10_000
"""Of a kind: each request is compared with all of them."""

_MIN_LEN = 8
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")

Digests = tuple[bytes, ...]
"""SHA-256 of keys."""


class ListedKeys(Protocol):
    """Keys that may change."""

    def digests(self) -> Digests:
        """Those that are accepted now."""


class NoListedKeys:
    """There are none."""

    def digests(self) -> Digests:
        """None."""
        return ()


class KeyFile:
    """What is in a file; while that cannot be used, or has no key, what was in it before.

    So nobody is let in, and nobody shut out, by half a change.

    Args:
        path: The file.
        clock: Seconds, monotonic.

    Raises:
        SettingsError: It cannot be used; names it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen = stamp_of([path])
        self._digests = _digests_in(path)
        self._look_at_s = clock() + LOOK_EVERY_S
        self._failing = ""

    def digests(self) -> Digests:
        """Those of a second ago at most."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            self._look()
        return self._digests

    def _look(self) -> None:
        stamp = stamp_of([self._path])
        if stamp == self._seen:
            return
        try:
            digests = _digests_in(self._path)
        except SettingsError as error:
            if str(error) != self._failing:
                logger.warning("still accepting the last keys: %s", error)
            self._failing = str(error)
            return
        self._failing = ""
        if stamp_of([self._path]) == stamp:  # else it is being written: the next look has it
            self._digests, self._seen = digests, stamp
            logger.info("%d keys are accepted of %s, which has changed", len(digests), self._path)


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, each once.

    Raises:
        SettingsError: It cannot be read, or a key cannot be used; never shows one.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise SettingsError(f"cannot read API keys from {path}: {why}") from error
    entries = (entry.strip() for entry in lines)
    keys = tuple(dict.fromkeys(line for line in entries if line and not line.startswith("#")))
    if not keys:
        raise SettingsError(f"{path} has no API key", fix="write one key a line")
    for key in keys:
        check_key(key, str(path))
    check_number(len(keys), str(path))
    return keys


def check_key(key: str, source: str) -> None:
    """Raises SettingsError for a key that cannot be sent in a header or is easily guessed.

    Args:
        key: Never shown.
        source: Where it is from.
    """
    if not _KEY.fullmatch(key) or len(key) < _MIN_LEN:
        raise SettingsError(
            f"{source} has an API key that cannot be used",
            fix=f"a key has {_MIN_LEN} or more visible ASCII characters, none of them a comma",
        )


def check_number(num_keys: int, source: str) -> None:
    """Raises SettingsError for more keys than are looked through in time.

    Args:
        num_keys: How many there are.
        source: Where they are from.
    """
    if num_keys > MAX_KEYS:
        raise SettingsError(f"{source} has {num_keys} API keys, expected {MAX_KEYS} at most")


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _digests_in(path: Path) -> Digests:
    return tuple(map(digest_of, read_keys(path)))
