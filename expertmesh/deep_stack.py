"""Threads for native code that recurses as deep as its input says.

The stack of an ordinary thread has 8 MiB, and native code that needs more ends the whole process.
Memory is only taken for what is used of a stack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STACK_BYTES = 512 * 2**20

_stack_size = threading.Lock()
"""Held while the size of new stacks, which is one for the process, is a special one."""


class DeepStackPool(ThreadPoolExecutor):
    """A pool whose threads have a stack of `STACK_BYTES`."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a function in one of the threads, which may be started for it."""
        with _stack_size:
            usual = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(usual)
