"""Compiled kernels on disk, as this process uses them: found there, or compiled and put there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from expertmesh.errors import StartupError
from expertmesh.file_lock import exclusive

logger = logging.getLogger(__name__)

_LOCK_NAME = "saving.lock"
_LOCK_TIMEOUT_S = 10.0

Fetch = Callable[[], bool]
"""Gets kernels from elsewhere onto the disk; True if it is worth looking there again."""


class NumbaCache(Protocol):
    """What is used of a kernel's cache, which has no public name."""

    cache_path: str
    load_overload: Callable[[object, object], object]
    save_overload: Callable[[object, object], None]


class KeptKernels:
    """What this process finds and compiles.

    Attributes:
        num_loaded: Kernels that were found on disk.
        num_compiled: Kernels that were compiled here, those that others contain included.
        fetch: Asked for a kernel that is not on disk, before it is compiled here. By default
            nothing else can have it.
    """

    def __init__(self) -> None:
        self.num_loaded = 0
        self.num_compiled = 0
        self.fetch: Fetch = from_nowhere
        self._is_keeping = True
        self._is_locking = True

    def watch(self, cache: NumbaCache) -> None:
        """Counts what a kernel's cache does, and fetches what it misses.

        A full disk costs the next start its kernels, and nothing now: Numba would not compile.
        One process saves at a time: of two that save a function for different types, both would
        choose the same file, and the next start would take one kernel for the other.
        """
        load, save = cache.load_overload, cache.save_overload

        def load_or_fetch(signature: object, target: object) -> object:
            found = load(signature, target)
            while found is None and self.fetch():
                found = load(signature, target)
            self.num_loaded += found is not None
            return found

        def save_if_possible(signature: object, compiled: object) -> None:
            self.num_compiled += 1
            if self._is_keeping:
                try:
                    with self._alone(Path(cache.cache_path)):
                        save(signature, compiled)
                except OSError as error:
                    logger.warning("a compiled kernel cannot be kept for the next start: %s", error)

        cache.load_overload = load_or_fetch
        cache.save_overload = save_if_possible

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """While no other process saves; without that where a file system has no locks."""
        with ExitStack() as held:
            if self._is_locking:
                try:
                    held.enter_context(exclusive(folder / _LOCK_NAME, _LOCK_TIMEOUT_S))
                except StartupError as error:
                    self._is_keeping = False
                    raise OSError(f"{error}; nor are those that follow") from error
                except OSError as error:
                    self._is_locking = False
                    logger.warning("kernels are saved without a lock: %s", error)
            yield


def from_nowhere() -> bool:
    """Nothing was fetched."""
    return False


KEPT = KeptKernels()
"""Of this process; loading and compiling is done by one thread at a time."""
