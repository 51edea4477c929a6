"""Keeps the child processes of `expertmesh serve`: starts, watches, restarts and stops them.

Owner: the main thread calls every method. Threads: `NAME-ready` (one a start, ends when the child
is ready, dead or late) and the waiter thread of each child only put events into the queue that the
main thread reads. The queue holds at most two events a start, so it needs no bound.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from expertmesh.errors import StartupError
from expertmesh.processes import Child

logger = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 30.0
STOP_WITHIN_S = 4.0
"""All children are gone so long after `stop` was called, or are killed."""

Start = Callable[[Callable[[Child], None]], Child]
"""Starts a process; the argument is what to call when it has ended."""


@dataclass
class Member:
    """A process that the supervisor keeps."""

    name: str
    start: Start
    restart: Start | None
    """When it has ended, unless it was told to. None: its end is the end of all."""
    child: Child | None = None
    info: dict[str, object] | None = None
    """Ready line of its present life; None while it starts."""
    back_off_s: float = FIRST_BACK_OFF_S
    ready_since_s: float = 0.0
    start_at_s: float | None = None
    """time.monotonic() of the next start; None while it runs."""


@dataclass(frozen=True)
class _Event:
    member: Member
    child: Child
    outcome: dict[str, object] | StartupError | None
    """Ready line, why it is not ready, or None: it has ended."""


class Supervisor:
    """A set of child processes.

    Args:
        members: In the order in which they are stopped.
        startup_timeout_s: For a child to become ready.
    """

    def __init__(self, members: Iterable[Member], *, startup_timeout_s: float) -> None:
        self.members = tuple(members)
        self._startup_timeout_s = startup_timeout_s
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts all, without waiting."""
        for member in self.members:
            self._start(member, member.start)

    def wait_until(self, condition: Callable[[], bool], *, poll_s: float = 0.1) -> None:
        """Returns when all are ready and then `condition()` holds, which is polled.

        Raises:
            StartupError: A child ended or did not become ready.
        """
        while not (all(member.info is not None for member in self.members) and condition()):
            event = self._next_event(poll_s)
            if event is None or event.child is not event.member.child:
                continue
            if isinstance(event.outcome, StartupError):
                raise event.outcome
            if event.outcome is None and event.member.info is not None:
                raise StartupError(f"{event.member.name} {event.child.describe_exit()}")
            if event.outcome is not None:
                self._note_ready(event.member, event.outcome)

    def watch(self) -> None:
        """Runs for ever: restarts members that end, with growing pauses.

        Raises:
            StartupError: A member ended that is not restarted.
        """
        while True:
            event = self._next_event(self._pause_s())
            if event is not None and event.child is event.member.child:
                self._handle(event)
            for member in self.members:
                if member.start_at_s is not None and member.start_at_s <= time.monotonic():
                    self._start(member, member.restart or member.start)

    def stop(self, *, grace_s: float) -> None:
        """Stops the members in order; those that restart together, at the end.

        Args:
            grace_s: For each of those that do not restart.
        """
        deadline = time.monotonic() + STOP_WITHIN_S
        for child in self._children(restarts=False):
            child.stop(min(grace_s, max(0.1, deadline - time.monotonic() - 1.0)))
        rest = self._children(restarts=True)
        for child in rest:
            child.terminate()
        for child in rest:
            child.stop(max(0.1, deadline - time.monotonic()))

    def kill(self) -> None:
        """Ends all at once; may be called from a signal handler."""
        for member in self.members:
            if member.child is not None:
                member.child.kill()

    def _start(self, member: Member, start: Start) -> None:
        member.info, member.start_at_s = None, None
        member.child = child = start(lambda ended: self._events.put(_Event(member, ended, None)))

        def wait() -> None:
            try:
                outcome: dict[str, object] | StartupError = child.wait_ready(
                    self._startup_timeout_s
                )
            except StartupError as error:
                outcome = error
            self._events.put(_Event(member, child, outcome))

        threading.Thread(target=wait, name=f"{member.name}-ready", daemon=True).start()

    def _next_event(self, timeout_s: float) -> _Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _pause_s(self) -> float:
        """Until the next planned start, a second at most."""
        starts = [member.start_at_s for member in self.members if member.start_at_s is not None]
        return max(0.0, min([1.0, *(start - time.monotonic() for start in starts)]))

    def _handle(self, event: _Event) -> None:
        member, child, outcome = event.member, event.child, event.outcome
        if isinstance(outcome, StartupError):
            logger.error("%s", outcome)
            child.kill()  # late; its end is the next event
        elif outcome is not None:
            self._note_ready(member, outcome)
            logger.info("%s is ready again, process %d", member.name, child.pid)
        elif member.restart is None:
            raise StartupError(f"{member.name} {child.describe_exit()}")
        elif child.exit_code == 0 and member.info is not None:
            logger.info("%s (process %d) was told to end and stays away", member.name, child.pid)
        else:
            self._plan_restart(member, child)

    def _note_ready(self, member: Member, info: dict[str, object]) -> None:
        member.info = info
        member.ready_since_s = time.monotonic()

    def _plan_restart(self, member: Member, child: Child) -> None:
        now = time.monotonic()
        if member.info is not None and now - member.ready_since_s > MAX_BACK_OFF_S:
            member.back_off_s = FIRST_BACK_OFF_S  # it had been well for a while
        logger.warning(
            "%s (process %d) %s; starting it again in %g s",
            *(member.name, child.pid, child.describe_exit(), member.back_off_s),
        )
        member.start_at_s = now + member.back_off_s
        member.back_off_s = min(2 * member.back_off_s, MAX_BACK_OFF_S)

    def _children(self, *, restarts: bool) -> list[Child]:
        members = [member for member in self.members if (member.restart is not None) is restarts]
        return [member.child for member in members if member.child is not None]
