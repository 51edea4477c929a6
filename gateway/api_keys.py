"""API and admin keys: which are accepted, how they reach the gateway, how a caller shows one.

Only SHA-256 digests are kept. They come to a gateway in its environment, not with its settings,
which are on a command line that every user of the machine can read; the gateway removes them from
there, so that no process that it starts has them. Files with keys it reads by itself, and anew when
they have changed: see `gateway.key_file`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertmesh.errors import AuthenticationError, SettingsError
from gateway.key_file import (
    KeyFile,
    ListedKeys,
    NoListedKeys,
    check_key,
    check_number,
    digest_of,
    read_keys,
)

KEYS_VARIABLE = "EXPERTMESH_API_KEYS"
"""Environment variable with accepted keys, separated by commas or spaces."""
DIGESTS_VARIABLE = "EXPERTMESH_API_KEY_DIGESTS"
"""Environment variable with digests of accepted keys, hexadecimal, separated by commas."""
ADMIN_KEYS_VARIABLE = "EXPERTMESH_ADMIN_KEYS"
ADMIN_DIGESTS_VARIABLE = "EXPERTMESH_ADMIN_KEY_DIGESTS"
"""The same for those that may drain expert workers and move experts."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """The keys that are accepted; with none of them everybody is served.

    Args:
        digests: SHA-256 of each key that stays.
        listed: Further ones, which may change.
    """

    def __init__(self, digests: Iterable[bytes] = (), listed: ListedKeys | None = None) -> None:
        self._fixed = tuple(dict.fromkeys(digests))
        self._listed = listed or NoListedKeys()

    @classmethod
    def of(cls, keys: Iterable[str]) -> ApiKeys:
        """These keys."""
        return cls(map(digest_of, keys))

    @classmethod
    def from_environment(cls, variable: str = DIGESTS_VARIABLE, file: str = "") -> ApiKeys:
        """The digests of the environment, which are removed from there, and the keys of a file.

        Args:
            variable: Where the digests are.
            file: Path; empty for none.

        Raises:
            SettingsError: Something there is not a digest, or the file cannot be used.
        """
        found = [part for part in os.environ.pop(variable, "").split(",") if part]
        if not all(map(_DIGEST.fullmatch, found)):
            raise SettingsError(f"{variable} is not a list of SHA-256 digests")
        return cls(map(bytes.fromhex, found), KeyFile(Path(file)) if file else None)

    def to_environment(self, variable: str = DIGESTS_VARIABLE) -> dict[str, str]:
        """What a gateway's environment must have of keys that stay; empty without."""
        digests = ",".join(digest.hex() for digest in self._fixed)
        return {variable: digests} if digests else {}

    @property
    def required(self) -> bool:
        """True if callers must show a key; that does not change."""
        return bool(self._fixed or self._listed.digests())

    def check(self, key: str | None) -> None:
        """Refuses a caller without an accepted key.

        Every key is compared to its end, so that the time does not tell how close a guess is.

        Args:
            key: What the caller shows; None if nothing.

        Raises:
            AuthenticationError: It is missing or not accepted.
        """
        accepted = (*self._fixed, *self._listed.digests())
        if not accepted:
            return
        if not key:
            raise AuthenticationError("an API key is needed: send Authorization: Bearer KEY")
        digest = digest_of(key)
        found = [secrets.compare_digest(digest, other) for other in accepted]
        if not any(found):
            raise AuthenticationError("the API key is not accepted")


@dataclass(frozen=True)
class KeySources:
    """Keys of one kind as an operator gave them."""

    fixed: tuple[str, ...] = field(default=(), repr=False)
    """Of flags and the environment."""
    listed: tuple[str, ...] = field(default=(), repr=False)
    """Of a file, which the gateway reads by itself."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All, each once."""
        return tuple(dict.fromkeys((*self.fixed, *self.listed)))


@dataclass(frozen=True)
class GivenKeys:
    """Keys as an operator gave them."""

    callers: KeySources = KeySources()
    """Those who generate."""
    operators: KeySources = KeySources()
    """Those who drain expert workers and move experts."""

    @property
    def api(self) -> tuple[str, ...]:
        """All keys of those who generate."""
        return self.callers.keys

    @property
    def admin(self) -> tuple[str, ...]:
        """All keys of those who drain expert workers and move experts."""
        return self.operators.keys

    def to_environment(self) -> dict[str, str]:
        """What a gateway's environment must have, beside settings that name the files; digests
        only."""
        return {
            **ApiKeys.of(self.callers.fixed).to_environment(),
            **ApiKeys.of(self.operators.fixed).to_environment(ADMIN_DIGESTS_VARIABLE),
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
        SettingsError: A file cannot be read, a key cannot be sent in a header, or there is no key
            where one was to be, which would let everybody in; never shows one.
    """
    os.environ.pop("EXPERTMESH_API_KEY", None)  # came as a flag
    named = [key.strip() for entry in given for key in entry.split(",")]
    return GivenKeys(
        _collected([("--api-key", named)] if given else [], KEYS_VARIABLE, file),
        _collected([], ADMIN_KEYS_VARIABLE, admin_file),
    )


def _collected(named: list[tuple[str, list[str]]], variable: str, file: Path | None) -> KeySources:
    text = os.environ.pop(variable, None)
    if text is not None:
        named = [*named, (variable, re.split(r"[\s,]+", text))]
    fixed: dict[str, None] = {}
    for source, found in named:
        if not any(found):
            raise SettingsError(f"{source} has no key", fix="give one, or leave it out")
        for key in filter(None, found):
            check_key(key, source)
            fixed[key] = None
    sources = KeySources(tuple(fixed), () if file is None else read_keys(file))
    check_number(len(sources.keys), variable if file is None else f"{variable} with {file}")
    return sources
