"""Whether files have changed since they were read."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Differs once one of the files was written or replaced, be it by way of a link."""
    stamps = []
    for path in paths:
        with suppress(OSError):  # in the middle of a change
            status = path.stat()
            stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stamps)
