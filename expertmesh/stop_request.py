"""How a worker process is told to end: by a signal, or by the end of its parent.

Threads: `exit-guard` ends the process without ceremony if the orderly end takes too long, since a
port that stays held, or a process that stays, is worse than a cut call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from queue import Empty, SimpleQueue

from expertmesh.processes import watch_lifeline

_STUCK_EXIT_CODE = 71
_INTERRUPTED_EXIT_CODE = 130
_BELL_BYTES = 4096


class StopRequest:
    """A wish to end, made once or often, from a signal handler or any thread; one thread waits.

    Not a `threading.Event`: its `set` takes a lock that the interrupted thread may hold, so that a
    signal at the wrong moment would block for ever. `SimpleQueue.put` may interrupt itself.

    The thread that waits, waits for bytes of a socket. The system may give a signal to any thread;
    Python's handler runs in the main thread, which a lock or a queue would not wake for that.
    """

    def __init__(self) -> None:
        self._wishes: SimpleQueue[None] = SimpleQueue()  # bounded by the signals that come
        self._bell, self._door = socket.socketpair()
        self._bell.setblocking(False)  # as many bytes as it holds wake whoever waits
        self._made = False
        self._orderly = False

    def orderly(self) -> None:
        """From now on there is something to end in order."""
        self._orderly = True

    def listen(self) -> None:
        """Makes SIGTERM, SIGINT and the end of the parent such a wish. In the main thread.

        A SIGINT that is not the first wish ends the process at once: somebody at a terminal does
        not want to wait for the orderly end.
        """
        watch_lifeline(self.make)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.make())
        signal.signal(signal.SIGINT, lambda _number, _frame: self._interrupt())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `keep_for_later`

    def _interrupt(self) -> None:
        if self._made:
            os._exit(_INTERRUPTED_EXIT_CODE)
        self.make()

    def make(self) -> None:
        """Asks the process to end."""
        if not self._orderly:
            os._exit(0)
        self._made = True
        self._wishes.put(None)
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"\0")

    @property
    def made(self) -> bool:
        """True from the first wish on."""
        return self._made

    def wait(self) -> None:
        """Returns at the first wish that was not waited for yet."""
        while True:
            try:
                return self._wishes.get_nowait()
            except Empty:
                self._door.recv(_BELL_BYTES)


def keep_for_later() -> None:
    """Before this process becomes another program of ours: SIGTERM waits until that one listens.

    The first process of a container gets no signal that it has no handler for, unless it is
    blocked; one that is, stays so in the next program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def end_within(seconds: float) -> None:
    """Ends the process without ceremony if it is still there after so many seconds."""
    guard = threading.Timer(seconds, os._exit, args=(_STUCK_EXIT_CODE,))
    guard.name, guard.daemon = "exit-guard", True
    guard.start()
