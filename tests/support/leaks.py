"""Finds child processes and named threads that a test leaves behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_ANONYMOUS = re.compile(r"(Thread|Dummy)-\d+|asyncio_\d+|pytest_timeout|tqdm")
"""Threads of libraries: gRPC's channel threads end some time after a channel is closed."""
_GRACE_S = 5.0


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _named_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not _ANONYMOUS.match(thread.name)}


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails if what was started meanwhile is still there a moment after the end."""
    guard = LeakGuard()
    yield
    leaks = guard.remaining(_GRACE_S)
    assert leaks == [], f"left behind: {', '.join(leaks)}"


class LeakGuard:
    """Remembers what runs now and later tells what has been added since."""

    def __init__(self) -> None:
        self._children = _children()
        self._threads = _named_threads()

    def remaining(self, grace_s: float) -> list[str]:
        """Descriptions of processes and threads that are new and outlive `grace_s` seconds."""
        deadline = time.monotonic() + grace_s
        for thread in _named_threads() - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        new_children = _children() - self._children
        _, alive = psutil.wait_procs(new_children, timeout=max(0.0, deadline - time.monotonic()))
        threads = [f"thread {thread.name}" for thread in _named_threads() - self._threads]
        return sorted(threads + [_describe(process) for process in alive])


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        return f"process {process.pid}"
