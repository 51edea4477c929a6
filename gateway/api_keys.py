"""API and admin keys: which are accepted, how they reach the gateway, how a caller shows one.

Only SHA-256 digests are kept. They come to a gateway in its environment, not with its settings,
which are on a command line that every user of the machine can read; the gateway removes them from
there, so that no process that it starts has them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertmesh.errors import AuthenticationError, SettingsError

KEYS_VARIABLE = "EXPERTMESH_API_KEYS"
"""Environment variable with accepted keys, separated by commas or spaces."""
DIGESTS_VARIABLE = "EXPERTMESH_API_KEY_DIGESTS"
"""Environment variable with digests of accepted keys, hexadecimal, separated by commas."""
ADMIN_KEYS_VARIABLE = "EXPERTMESH_ADMIN_KEYS"
ADMIN_DIGESTS_VARIABLE = "EXPERTMESH_ADMIN_KEY_DIGESTS"
"""The same for those that may drain expert workers and move experts."""

_MIN_LEN = 8
_MAX_KEYS = 10_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")


class ApiKeys:
    """The keys that are accepted; with none of them everybody is served.

    Args:
        digests: SHA-256 of each key.
    """

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests = tuple(dict.fromkeys(digests))

    @classmethod
    def of(cls, keys: Iterable[str]) -> ApiKeys:
        """These keys."""
        return cls(hashlib.sha256(key.encode()).digest() for key in keys)

    @classmethod
    def from_environment(cls, variable: str = DIGESTS_VARIABLE) -> ApiKeys:
        """The digests of the environment, which are removed from there.

        Raises:
            SettingsError: Something there is not a digest.
        """
        found = [part for part in os.environ.pop(variable, "").split(",") if part]
        if not all(map(_DIGEST.fullmatch, found)):
            raise SettingsError(f"{variable} is not a list of SHA-256 digests")
        return cls(map(bytes.fromhex, found))

    def to_environment(self, variable: str = DIGESTS_VARIABLE) -> dict[str, str]:
        """What a gateway's environment must have; empty without keys."""
        digests = ",".join(digest.hex() for digest in self._digests)
        return {variable: digests} if digests else {}

    @property
    def required(self) -> bool:
        """True if callers must show a key."""
        return bool(self._digests)

    def check(self, key: str | None) -> None:
        """Refuses a caller without an accepted key.

        Every key is compared to its end, so that the time does not tell how close a guess is.

        Args:
            key: What the caller shows; None if nothing.

        Raises:
            AuthenticationError: It is missing or not accepted.
        """
        if not self._digests:
            return
        if not key:
            raise AuthenticationError("an API key is needed: send Authorization: Bearer KEY")
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = [secrets.compare_digest(digest, accepted) for accepted in self._digests]
        if not any(found):
            raise AuthenticationError("the API key is not accepted")


@dataclass(frozen=True)
class GivenKeys:
    """Keys as an operator gave them."""

    api: tuple[str, ...] = field(default=(), repr=False)
    """Of those who generate."""
    admin: tuple[str, ...] = field(default=(), repr=False)
    """Of those who drain expert workers and move experts."""

    def to_environment(self) -> dict[str, str]:
        """What a gateway's environment must have; digests only."""
        return {
            **ApiKeys.of(self.api).to_environment(),
            **ApiKeys.of(self.admin).to_environment(ADMIN_DIGESTS_VARIABLE),
        }


def bearer_key(authorization: str | None) -> str | None:
    """The key of an Authorization header; None if it has none."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def collect_keys(
    given: Sequence[str] = (), file: Path | None = None, admin_file: Path | None = None
) -> GivenKeys:
    """All keys of flags, environment and files; takes them out of the environment.

    Args:
        given: API keys of flags.
        file: With an API key a line.
        admin_file: With an admin key a line.

    Raises:
        SettingsError: A file cannot be read, or a key cannot be sent in a header; never shows it.
    """
    os.environ.pop("EXPERTMESH_API_KEY", None)  # came as a flag
    named = [key.strip() for entry in given for key in entry.split(",")]
    return GivenKeys(
        _collected([("--api-key", named)], KEYS_VARIABLE, file),
        _collected([], ADMIN_KEYS_VARIABLE, admin_file),
    )


def _collected(
    named: list[tuple[str, list[str]]], variable: str, file: Path | None
) -> tuple[str, ...]:
    listed = re.split(r"[\s,]+", os.environ.pop(variable, ""))
    sources = [*named, (variable, listed), (str(file), _lines(file))]
    keys: dict[str, None] = {}
    for source, found in sources:
        for key in filter(None, found):
            _check_key(key, source)
            keys[key] = None
    if file is not None and not keys:
        raise SettingsError(f"{file} has no API key", fix="write one key a line")
    if len(keys) > _MAX_KEYS:
        raise SettingsError(f"there are {len(keys)} API keys; at most {_MAX_KEYS}")
    return tuple(keys)


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise SettingsError(f"cannot read API keys from {file}: {why}") from error
    return [line for entry in lines if (line := entry.strip()) and not line.startswith("#")]


def _check_key(key: str, source: str) -> None:
    if not _KEY.fullmatch(key) or len(key) < _MIN_LEN:
        raise SettingsError(
            f"{source} has an API key that cannot be used",
            fix=f"a key has {_MIN_LEN} or more visible ASCII characters, none of them a comma",
        )
