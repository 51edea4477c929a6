"""How a worker process is told to end: by a signal, or by the end of its parent.

Threads: `exit-guard` ends the process without ceremony if the orderly end takes too long, since a
port that stays held, or a process that stays, is worse than a cut call.
"""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue

from expertmesh.processes import watch_lifeline

_STUCK_EXIT_CODE = 71


class StopRequest:
    """A wish to end, made once or often, from a signal handler or any thread; one thread waits.

    Not a `threading.Event`: its `set` takes a lock that the interrupted thread may hold, so that a
    signal at the wrong moment would block for ever. `SimpleQueue.put` may interrupt itself.
    """

    def __init__(self) -> None:
        self._wishes: SimpleQueue[None] = SimpleQueue()  # bounded by the signals that come
        self._made = False
        self._orderly = False

    def orderly(self) -> None:
        """From now on there is something to end in order."""
        self._orderly = True

    def listen(self) -> None:
        """Makes SIGTERM, SIGINT and the end of the parent such a wish. In the main thread."""
        watch_lifeline(self.make)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.make())

    def make(self) -> None:
        """Asks the process to end."""
        if not self._orderly:
            os._exit(0)
        self._made = True
        self._wishes.put(None)

    @property
    def made(self) -> bool:
        """True from the first wish on."""
        return self._made

    def wait(self, *, exit_guard_s: float) -> None:
        """Returns at the first wish.

        Args:
            exit_guard_s: Longest time from then on to the end of the process, in seconds.
        """
        self._wishes.get()
        guard = threading.Timer(exit_guard_s, os._exit, args=(_STUCK_EXIT_CODE,))
        guard.name, guard.daemon = "exit-guard", True
        guard.start()
