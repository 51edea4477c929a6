"""Keeps Python's search for cycles out of the way of requests.

By default Python looks through its young objects whenever 700 more have been made than freed, in
whatever thread and moment that happens: in the middle of a layer, while expert workers wait. What
is loaded at the start is frozen here, and never looked at again; under load the young objects are
looked through much less often, and all others when nothing is done anyway. Reference counts free
nearly everything all the same.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

LOOK_EVERY_S = 1.0
YOUNG_OBJECTS = 20_000
"""Surplus of new objects after which even a busy process looks through them: about a millisecond,
and a few MB at most that wait for it."""


def pause_while_starting() -> None:
    """No search for cycles until a `QuietGc` is entered: what a start makes, modules above all,
    mostly stays, and a tenth of a start's time would go into looking through it again and again."""
    gc.disable()


class QuietGc:
    """Owns the settings of `gc` in this process while it is entered; one a process.

    Thread: `quiet-gc` looks once in a while whether anything was done.

    Args:
        work_done: A value that differs whenever something was done; called in the thread.
        look_every_s: Seconds between two looks.
    """

    def __init__(
        self, work_done: Callable[[], object], *, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._work_done = work_done
        self._look_every_s = look_every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quiet-gc", daemon=True)
        self._before = gc.get_threshold()

    def __enter__(self) -> Self:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *self._before[1:])
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(5.0)
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def _run(self) -> None:
        """Collects once when nothing was done since the last look, until something is done."""
        last, collected = self._work_done(), False
        while not self._stopping.wait(self._look_every_s):
            now = self._work_done()
            if now != last:
                last, collected = now, False
            elif not collected:
                gc.collect()
                collected = True
