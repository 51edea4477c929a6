"""Where the model thread waits for replies: it reads direct connections itself while it waits.

Threads: the model thread waits; any other may put outcomes of calls that went over gRPC or failed,
and rings a bell if the model thread sleeps.
"""

from __future__ import annotations

import math
import os
import select
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from attention_worker.calls import Outcome

_Interest = tuple[int, int]


class Readable(Protocol):
    """A stream that may have a direct connection."""

    @property
    def interest(self) -> _Interest:
        """Descriptor and events of its direct connection; -1 without one."""

    def on_ready(self) -> None:
        """Reads and writes what can be, without waiting."""


class Waiting:
    """The one place where the model thread sleeps while rows travel."""

    def __init__(self) -> None:
        self._bell_out, self._bell_in = os.pipe()
        for descriptor in (self._bell_out, self._bell_in):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)
        self._asleep = False
        self._interests: tuple[_Interest, ...] = ()
        self._poll = self._make_poll()

    def wake(self) -> None:
        """Ends the wait that is going on, if any; from any thread."""
        if self._asleep:
            os.write(self._bell_in, b"\0")

    def wait(self, outcomes: deque[Outcome], streams: Sequence[Readable], timeout_s: float) -> None:
        """Returns when there may be an outcome, or after the timeout.

        Args:
            outcomes: Looked at again once others know that they must wake us.
            streams: Whose direct connections are read.
            timeout_s: Longest wait.
        """
        self._watch(tuple([stream.interest for stream in streams]))
        self._asleep = True
        try:
            ready = [] if outcomes else self._poll.poll(math.ceil(timeout_s * 1000))
        finally:
            self._asleep = False
        for descriptor, _ in ready:
            if descriptor == self._bell_out:
                os.read(self._bell_out, 4096)
            for stream, interest in zip(streams, self._interests, strict=True):
                if interest[0] == descriptor:
                    stream.on_ready()

    def _watch(self, interests: tuple[_Interest, ...]) -> None:
        if interests == self._interests:
            return
        self._poll = self._make_poll()
        for descriptor, events in interests:
            if descriptor >= 0:
                self._poll.register(descriptor, events)
        self._interests = interests

    def _make_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._bell_out, select.POLLIN)
        return poll


class Outcomes:
    """Outcomes of one dispatch, at most one of each of its calls.

    Args:
        waiting: Of the client that it belongs to.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._outcomes: deque[Outcome] = deque()

    def put(self, outcome: Outcome) -> None:
        """Adds one, from any thread."""
        self._outcomes.append(outcome)
        self._waiting.wake()

    def get(self, streams: Sequence[Readable], timeout_s: float) -> Outcome | None:
        """The next one; None if there may be none before the timeout. The model thread."""
        if not self._outcomes:
            self._waiting.wait(self._outcomes, streams, timeout_s)
        return self._outcomes.popleft() if self._outcomes else None
