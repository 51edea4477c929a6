"""Which of several gateways may order moves of experts: one leader, with a fencing token.

A token is larger than every earlier one. Expert workers refuse orders with a token lower than they
have seen, so a leader that was replaced without noticing can do no harm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from expertmesh.errors import StartupError
from expertmesh.file_lock import sync_folder, try_lock

logger = logging.getLogger(__name__)

OnChange = Callable[[int | None], None]
"""Told the fencing token while leader, None when not any more. Must return soon."""

_POLL_S = 0.25
_JOIN_S = 5.0


class Election(Protocol):
    """Decides whether this gateway leads."""

    def start(self, on_change: OnChange) -> None:
        """Takes part; `on_change` is called from another thread, once for each change."""

    def stop(self) -> None:
        """Leads no more, lets others do so, and ends. `on_change` hears None if it led."""


class NoElection:
    """Of a gateway that never leads."""

    def start(self, on_change: OnChange) -> None:
        """Nothing ever changes."""

    def stop(self) -> None:
        """Nothing to end."""


class FileElection:
    """Leads whoever holds the lock on a file, which the kernel frees when its holder dies.

    The file's text is the last token, in decimal. It is raised and synced before anybody is told,
    and the file is never removed, so tokens grow for as long as the file lives.

    Thread: `election` tries the lock, and holds it from then on.

    Args:
        path: The file; its folder is made. All gateways of a machine that share expert workers
            must name the same.
        poll_s: Seconds between two tries to get the lock.
    """

    def __init__(self, path: Path, poll_s: float = _POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_change: OnChange) -> None:
        """Begins to try.

        Raises:
            StartupError: The file cannot be made, or is no such file.
        """
        # Not inherited (Python's default): a child must not hold the lock when we are gone.
        descriptor = _opened(self._path)
        self._thread = threading.Thread(
            target=self._run, args=(descriptor, on_change), name="election", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Frees the lock; the thread has ended when this returns."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self, descriptor: int, on_change: OnChange) -> None:
        try:
            if self._wait_for_lock(descriptor):
                self._lead(descriptor, on_change)
        except (OSError, ValueError):
            logger.exception("%s: cannot lead, as the fencing token was not raised", self._path)
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> bool:
        """True when the lock is ours, False when we are to stop."""
        while not try_lock(descriptor):
            if self._stopping.wait(self._poll_s):
                return False
        return not self._stopping.is_set()

    def _lead(self, descriptor: int, on_change: OnChange) -> None:
        token = self._raised_token(descriptor)
        logger.info("leads the placement of experts, with fencing token %d", token)
        on_change(token)
        self._stopping.wait()
        on_change(None)

    def _raised_token(self, descriptor: int) -> int:
        """The next token, which is in the file for good when this returns."""
        token = _read_token(descriptor) + 1
        # Zero-padded to one length, so that a torn write can't leave a smaller number with the
        # digits of a larger one behind it.
        os.pwrite(descriptor, f"{token:020d}\n".encode(), 0)
        os.fsync(descriptor)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            sync_folder(self._path.parent)
        return token


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}, expected a file to lock") from error
    try:
        _read_token(descriptor)
    except ValueError as error:
        os.close(descriptor)
        raise StartupError(
            f"{path} is not a file of fencing tokens: {error}",
            fix="name another file, or remove it while no gateway uses it",
        ) from error
    return descriptor


def _read_token(descriptor: int) -> int:
    """The last token; 0 if there was none. Raises ValueError for other text."""
    text = os.pread(descriptor, 64, 0).strip()
    return int(text) if text else 0
