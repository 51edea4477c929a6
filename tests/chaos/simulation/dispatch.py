"""A simulated attention worker: it asks copies of experts for rows, and adds up what comes back.

A step is a transaction. A copy that fails or is late is followed by another one in the same step;
if there is none, all of the step is dropped and computed again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from expertmesh.placement import ExpertMap
from gateway.placement.state import ExpertLoad
from tests.chaos.simulation.expert_worker import Rows, SimulatedWorker
from tests.chaos.simulation.virtual_time import Network, VirtualTime

LATE_S = 0.25
"""After this time another copy is asked too, if there is one;"""
TOO_LATE_S = 2.0
"""after this the step is dropped."""
PAUSE_S = 0.1
_TOP_K = 2
_MOST_ROWS = 8


@dataclass
class _Step:
    """Rows of one layer, and what came back for them."""

    layer: int
    experts_of_row: list[tuple[int, ...]]
    attempt: int = 0
    tried: dict[int, set[str]] = field(default_factory=dict)
    """Expert to the workers that were asked in this attempt."""
    answered: set[int] = field(default_factory=set)
    """Experts whose rows are there."""
    outputs: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(row, expert) to how often it was added up."""

    @property
    def experts(self) -> set[int]:
        return {expert for experts in self.experts_of_row for expert in experts}

    def is_answered(self, expert: int) -> bool:
        return expert in self.answered

    def rows_of(self, expert: int) -> tuple[int, ...]:
        return tuple(r for r, experts in enumerate(self.experts_of_row) if expert in experts)


@dataclass
class DispatchCounts:
    """What happened."""

    steps: int = 0
    retries: int = 0
    pauses: int = 0
    dropped: int = 0
    """Replies that came for what was there already."""


class SimulatedAttention:
    """Computes one step after the other.

    Args:
        name: Of the gateway's process; links are those of that.
        clock: The time.
        network: To the workers.
        random: Of rows.
        worker_at: The incarnation that a worker id stands for now; None if nobody is there.
        popularity: Of each expert, when asked.
        on_call: Called with each worker, and its rows, as a call arrives there; and when it was
            sent.
        fail: Called with what must not be.
    """

    def __init__(
        self,
        name: str,
        clock: VirtualTime,
        network: Network,
        random: Random,
        *,
        worker_at: Callable[[str], SimulatedWorker | None],
        popularity: Callable[[], ExpertLoad],
        on_call: Callable[[SimulatedWorker, Rows, float], None],
        fail: Callable[[str], None],
    ) -> None:
        self.alive = True
        self.counts = DispatchCounts()
        self._name = name
        self._clock = clock
        self._network = network
        self._random = random
        self._worker_at = worker_at
        self._popularity = popularity
        self._on_call = on_call
        self._fail = fail
        self._map: ExpertMap | None = None
        self._step: _Step | None = None

    def take_map(self, expert_map: ExpertMap) -> None:
        """A new expert map; the step that is on its way uses it too."""
        self._map = expert_map

    def begin_step(self) -> None:
        """Begins a step, unless one is on its way."""
        if not self.alive or self._step is not None or self._map is None:
            return
        popularity = self._popularity()
        slot = self._random.randrange(len(popularity))
        weights = popularity[slot].tolist()
        numbers = range(len(weights))
        rows = [
            tuple(sorted(set(self._random.choices(numbers, weights, k=_TOP_K))))
            for _ in range(self._random.randint(1, _MOST_ROWS))
        ]
        self._step = _Step(self._map.moe_layers[slot], rows)
        self._ask_for(self._step, self._step.experts)

    def lose(self, worker: SimulatedWorker) -> None:
        """The connection to a worker is gone: what it was asked for is asked of others."""
        step = self._step
        if not self.alive or step is None:
            return
        lost = {
            expert
            for expert, tried in step.tried.items()
            if expert not in step.answered and worker.worker_id in tried
        }
        self._ask_again(step, lost)

    def _ask_for(self, step: _Step, experts: set[int]) -> None:
        """Sends the rows of some experts, or drops the step if one has no copy to ask."""
        chosen: dict[str, set[int]] = {}
        for expert in sorted(experts):
            worker_id = self._choose(step, expert)
            if worker_id is None:
                self._pause(step)
                return
            chosen.setdefault(worker_id, set()).add(expert)
            step.tried.setdefault(expert, set()).add(worker_id)
        for worker_id, mine in chosen.items():
            self._call(step, worker_id, mine)

    def _choose(self, step: _Step, expert: int) -> str | None:
        """The first copy, in the order of the map, that was not asked yet."""
        expert_map = self._map
        assert expert_map is not None
        tried = step.tried.get(expert, set())
        copies_R = expert_map.copies_SER[expert_map.layer_slots[step.layer], expert]
        names = [expert_map.workers[index].worker_id for index in copies_R[copies_R >= 0]]
        return next((name for name in names if name not in tried), None)

    def _call(self, step: _Step, worker_id: str, experts: set[int]) -> None:
        worker = self._worker_at(worker_id)
        attempt, sent_s = step.attempt, self._clock.now_s
        if worker is None:
            self._ask_again(step, experts)
            return
        rows = Rows(step.layer, {expert: step.rows_of(expert) for expert in experts})

        def answer(reply: Rows | None) -> None:
            self._network.send(
                worker_id, self._name, lambda: self._take(step, attempt, experts, reply)
            )

        def arrive() -> None:
            if worker.usable:
                self._on_call(worker, rows, sent_s)
            worker.do(lambda: worker.answer(rows, answer))

        self._network.send(self._name, worker_id, arrive)
        self._clock.after(LATE_S, lambda: self._be_late(step, attempt, experts))
        self._clock.after(TOO_LATE_S, lambda: self._be_too_late(step, attempt, experts))

    def _be_late(self, step: _Step, attempt: int, experts: set[int]) -> None:
        if self._waits_for(step, attempt):
            late = experts - step.answered
            self._ask_again(step, {e for e in late if self._choose(step, e) is not None})

    def _be_too_late(self, step: _Step, attempt: int, experts: set[int]) -> None:
        if self._waits_for(step, attempt) and experts - step.answered:
            self._pause(step)

    def _waits_for(self, step: _Step, attempt: int) -> bool:
        return self.alive and step is self._step and attempt == step.attempt

    def _ask_again(self, step: _Step, experts: set[int]) -> None:
        if experts:
            self.counts.retries += 1
            self._ask_for(step, experts)

    def _take(self, step: _Step, attempt: int, experts: set[int], reply: Rows | None) -> None:
        """A reply; of replies for the same rows the first counts."""
        if not self._waits_for(step, attempt):
            self.counts.dropped += 1
            return
        if reply is None:
            self._ask_again(step, experts - step.answered)
            return
        for expert, row_ids in reply.row_ids.items():
            if step.is_answered(expert):
                self.counts.dropped += 1
                continue
            step.answered.add(expert)
            step.outputs.update((row, expert) for row in row_ids)
        if step.answered == step.experts:
            self._commit(step)

    def _commit(self, step: _Step) -> None:
        wanted = Counter((r, e) for r, experts in enumerate(step.experts_of_row) for e in experts)
        if step.outputs != wanted:
            self._fail(f"{self._name}: a step has {step.outputs}, expected {wanted}")
        self._step = None
        self.counts.steps += 1

    def _pause(self, step: _Step) -> None:
        """Drops what there is of a step, and computes it again in a moment."""
        self.counts.pauses += 1
        step.attempt += 1
        step.tried.clear()
        step.answered.clear()
        step.outputs.clear()
        attempt = step.attempt

        def again() -> None:
            if self._waits_for(step, attempt):
                self._ask_for(step, step.experts)

        self._clock.after(PAUSE_S, again)
