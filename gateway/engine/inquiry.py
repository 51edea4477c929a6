"""Which request takes expert workers down: suspects are computed in ever smaller steps.

A step was abandoned since expert workers were lost with the same rows. Its suspects are divided
into a few groups, and each is computed in a cautious step of its own. A group that passes is
cleared, and has its next tokens; one that costs an expert worker is divided again. Expert workers
are dear and steps are not, so there are as many groups as MAX_GROUPS, not two: among so many
suspects each is alone at once, and one more expert worker convicts the guilty one.

Nobody is convicted by bad luck: only a request whose rows were the only ones that an expert worker
had when it was lost, in the layer in which others were lost before. Expert workers that are killed
at one moment, as those of one machine are, are all known to be gone when the next step is sent.

Owner: the engine thread; a turn belongs to all engines of a gateway.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.engine.request_state import RequestState

MAX_GROUPS = 16
"""Into which suspects are divided."""
CALM_S = 0.25
"""From a loss to the next step: deaths at the same moment are noticed within some 10 ms."""
TURN_S = 0.05
"""Until it is looked again whether others are done with their suspects."""
MAX_LONE_LOSSES = 3
"""Expert workers that one request alone may take down, in whatever layers."""


@dataclass(frozen=True)
class _Group:
    states: tuple[RequestState, ...]
    layer: int
    """In which expert workers were lost."""
    num_lone_losses: int = 0
    """Since there is one request only."""


class InquiryTurn:
    """Whose suspects are computed where several engines share expert workers: those of one engine
    at a time, so that nobody is blamed for what suspects of another one do. From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Inquiry | None = None

    def take(self, inquiry: Inquiry) -> bool:
        """True if it is the turn of an inquiry, until it gives it back."""
        with self._lock:
            self._holder = self._holder or inquiry
            return self._holder is inquiry

    def give(self, inquiry: Inquiry) -> None:
        """An inquiry is over; no effect if it was not its turn."""
        with self._lock:
            if self._holder is inquiry:
                self._holder = None


class Inquiry:
    """Suspects, and who comes next.

    Args:
        turn: Shared by all inquiries of a gateway.
    """

    def __init__(self, turn: InquiryTurn) -> None:
        self._turn = turn
        self._groups: deque[_Group] = deque()
        self._next_at_s = 0.0

    @property
    def active(self) -> bool:
        """True while somebody is suspected."""
        return bool(self._groups)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next step may be sent."""
        if not self._groups:
            return 0.0
        return max(0.0 if self._turn.take(self) else TURN_S, self._next_at_s - now_s)

    def next_suspects(self) -> list[RequestState]:
        """The running requests of the group that comes next; none when the inquiry is over."""
        while self._groups:
            running = [state for state in self._groups[0].states if state.slot is not None]
            if running:
                return running
            self.clear_next()
        return []

    def clear_next(self) -> None:
        """The group that comes next was computed, or cannot be."""
        self._groups.popleft()
        self._give_turn()

    def lost(
        self, suspects: Sequence[RequestState], layer: int, now_s: float
    ) -> RequestState | None:
        """Expert workers were lost to a step: the first one, or that of the group that comes next.

        Args:
            suspects: Whose rows they had.
            layer: Of the rows.
            now_s: On the monotonic clock.

        Returns:
            Who is convicted, if anybody is; cleared of further suspicion.
        """
        self._next_at_s = now_s + CALM_S
        group = self._groups.popleft() if self._groups else None
        if group is None or len(suspects) != 1:
            self._groups.extendleft(reversed(_divided(suspects, layer)))
            guilty = None
        else:
            guilty = self._judge(group, suspects[0], layer)
        self._give_turn()
        return guilty

    def end(self) -> None:
        """Nobody is suspected any more."""
        self._groups.clear()
        self._give_turn()

    def _judge(self, group: _Group, suspect: RequestState, layer: int) -> RequestState | None:
        """An expert worker was lost to one request alone."""
        num_lone_losses = group.num_lone_losses + 1
        if layer == group.layer or num_lone_losses >= MAX_LONE_LOSSES:
            return suspect
        self._groups.appendleft(_Group((suspect,), layer, num_lone_losses))
        return None

    def _give_turn(self) -> None:
        if not self._groups:
            self._turn.give(self)


def _divided(states: Sequence[RequestState], layer: int) -> list[_Group]:
    """MAX_GROUPS groups at most, as equal as can be."""
    num_groups = min(MAX_GROUPS, len(states))
    return [_Group(tuple(states[index::num_groups]), layer) for index in range(num_groups)]
