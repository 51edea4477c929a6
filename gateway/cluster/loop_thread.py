"""A thread with an event loop of its own, for one task that is cancelled at the end.

What talks to Kubernetes is asynchronous and must not depend on how busy the gateway's own loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine


class LoopThread:
    """Runs one coroutine function.

    Args:
        name: Of the thread.
        main: What runs; it is cancelled once, and may then do what an end takes.
    """

    def __init__(self, name: str, main: Callable[[], Coroutine[None, None, None]]) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins, unless it was stopped before."""
        with self._lock:
            if not self._stopping:
                self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Cancels the task and waits for the end of the thread; may be called twice."""
        with self._lock:
            is_first, self._stopping = not self._stopping, True
            if is_first and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has ended by itself
                    self._loop.call_soon_threadsafe(self._cancel)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            with self._lock:
                if self._stopping:
                    return
                self._loop, self._task = loop, loop.create_task(self._main())
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(self._task)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            # Not asyncio.run: that waits for the threads in which names are resolved.
            loop.close()
