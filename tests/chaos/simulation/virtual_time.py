"""Events on a clock that only they move, and messages that arrive in order after random delays."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

Action = Callable[[], None]

_SHORTEST_DELAY_S = 0.0002
_RESEND_S = 2.0
"""What was not acknowledged is sent again after pauses that grow."""


class VirtualTime:
    """Runs actions at their times; those of the same time in the order they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._num_planned = 0

    def after(self, delay_s: float, action: Action) -> None:
        """Plans an action."""
        self._num_planned += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._num_planned, action))

    def every(self, period_s: float, action: Action) -> None:
        """Plans an action again and again, the first time after one period."""

        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run(self, until_s: float) -> None:
        """Runs what is planned until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until_s


class Network:
    """Delivers messages, each once: in order within a stream, late if a link is cut.

    Args:
        clock: When.
        random: Of the delays.
        longest_s: Of the delays.
    """

    def __init__(self, clock: VirtualTime, random: Random, longest_s: float) -> None:
        self._clock = clock
        self._random = random
        self._longest_s = longest_s
        self._last_s: dict[tuple[str, str, int], float] = {}
        self._cut_until_s: dict[frozenset[str], float] = {}

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """Messages between two parties wait until this is over, and are sent again some time on."""
        self._cut_until_s[frozenset((one, other))] = self._clock.now_s + duration_s

    def send(self, sender: str, receiver: str, action: Action, stream: int = 0) -> None:
        """Runs the action when the message arrives."""
        now_s = self._clock.now_s
        cut_until_s = self._cut_until_s.get(frozenset((sender, receiver)), 0.0)
        arrives_s = max(now_s, cut_until_s) + self._random.uniform(
            _SHORTEST_DELAY_S, self._longest_s
        )
        if cut_until_s > now_s:
            arrives_s += self._random.uniform(0.0, _RESEND_S)
        arrives_s = max(arrives_s, self._last_s.get((sender, receiver, stream), 0.0))
        self._last_s[sender, receiver, stream] = arrives_s
        self._clock.after(arrives_s - now_s, action)
