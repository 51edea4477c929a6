"""Kernels are compiled by a process of its own, which ends and takes the compiler's memory along.

A worker asks for it when a kernel that it wants is not on disk. Of the workers of one kind that ask
at the same time one has its kernels compiled, and the others wait and look again. When nothing
comes of it, whatever the reason, kernels are compiled by whoever needs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.cores import settle
from expertmesh.errors import StartupError
from expertmesh.file_lock import try_lock
from expertmesh.logs import configure_logging
from expertmesh.processes import Child, announce_failure, spawn_module, watch_lifeline
from expertmesh.settings import ExpertWorkerSettings

logger = logging.getLogger(__name__)

DEADLINE_S = 200.0
"""For all that a start waits for; then it has time left to compile what is missing itself."""
_LOOK_S = 0.2
_REPORT_S = 10.0
_NAME = "the process that compiles kernels"

WorkerSettings = TypeVar("WorkerSettings", AttentionWorkerSettings, ExpertWorkerSettings)


class CompileProcess:
    """Gets the kernels of a worker compiled by a child. Belongs to one thread at a time.

    Args:
        module: Compiles all kernels of that kind of worker: `python -m module arguments`.
        arguments: For the module.
        folder: Where kernels are kept.
        is_stopping: True once the worker was told to stop: the child is ended.
        deadline_s: Seconds from the first `fetch` on in which it waits.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        is_stopping: Callable[[], bool],
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._folder = folder
        self._is_stopping = is_stopping
        self._allowed_s = deadline_s
        self._ends_s: float | None = None  # on the monotonic clock
        self._is_over = False

    def fetch(self) -> bool:
        """Waits until kernels were compiled; True if it is worth looking for them again."""
        if self._is_over:
            return False
        if self._ends_s is None:
            self._ends_s = time.monotonic() + self._allowed_s
        try:
            with self._lock() as has_waited:
                if not has_waited:
                    self._is_over = True
                    self._compile()
                return True
        except (OSError, StartupError) as error:
            self._is_over = True
            if not self._is_stopping():
                logger.warning("%s; kernels are compiled here, which takes more memory", error)
            return False

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """The right to compile; yields whether another process had it meanwhile.

        Raises:
            OSError: There is no such lock here, or it took too long.
        """
        with (self._folder / f"{self._module}.lock").open("w") as file:
            has_waited = not try_lock(file.fileno())
            if has_waited:
                self._wait_for("another process compiles kernels", lambda: try_lock(file.fileno()))
            yield has_waited

    def _compile(self) -> None:
        """Raises StartupError if the child fails, TimeoutError if it takes too long."""
        logger.info("compiling kernels in a process of its own; the next start finds them")
        began_s = time.monotonic()
        child = spawn_module(self._module, self._arguments, _NAME)
        try:
            self._wait_for("compiling", lambda: not child.alive)
            _check(child)
        finally:
            child.stop(0.0)
        logger.info("kernels were compiled in %.0f s", time.monotonic() - began_s)

    def _wait_for(self, what: str, is_done: Callable[[], bool]) -> None:
        """Looks again and again, and tells how far it is."""
        assert self._ends_s is not None
        reported_s = 0.0
        while not is_done():
            now = time.monotonic()
            if now > self._ends_s or self._is_stopping():
                raise TimeoutError(f"{what}: not done within {self._allowed_s:g} s")
            if now > reported_s + _REPORT_S:
                reported_s = now
                logger.info("%s, %d so far", what, self._num_kernels())
            time.sleep(_LOOK_S)

    def _num_kernels(self) -> int:
        return sum(1 for _ in self._folder.rglob("*.nbc"))


def _check(child: Child) -> None:
    """Raises StartupError with what an ended child said, or how it ended."""
    if child.exit_code:
        child.wait_ready(1.0)
        raise StartupError(f"{_NAME} {child.describe_exit()}")


def run_compiler(
    read: Callable[[], WorkerSettings], compile_for: Callable[[WorkerSettings], None]
) -> int:
    """All that the child does; the parent is told what goes wrong.

    Args:
        read: Gives the settings of the worker.
        compile_for: Compiles its kernels; called with its cores and threads settled.

    Returns:
        The exit code.
    """
    watch_lifeline(lambda: os._exit(0))
    try:
        settings = read()
        configure_logging(replace(settings.log, log_level="warning"), "compiler")
        settle(settings.threads, settings.cores)
        compile_for(settings)
    except StartupError as error:
        announce_failure(error)
        return error.exit_code
    return 0
