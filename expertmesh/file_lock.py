"""A lock between processes, and writes that are either complete or absent."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.errors import StartupError

LOCK_TIMEOUT_S = 1800.0
"""Longer than a slow download and build by another process."""
_POLL_S = 0.05


@contextmanager
def exclusive(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds the lock file `path`; the system frees it if the process dies.

    Raises:
        StartupError: another process holds it longer than `timeout_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{path}: another process has held this lock for {timeout_s:.0f} s",
                    fix="wait for it, or end it",
                )
            time.sleep(_POLL_S)
        yield


def try_lock(descriptor: int) -> bool:
    """Locks an open file if nobody else has; the system frees it with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is there in full or not at all, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
