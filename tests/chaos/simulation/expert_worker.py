"""A simulated expert worker: it holds experts, loads, retires, frees, and answers for rows.

It keeps to the rules of the real one: orders of another incarnation or of a lower fencing token are
refused, experts are loaded one after the other, a retired one answers until it is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.placement.state import ExpertKey, Order, WorkerView
from tests.chaos.simulation.virtual_time import Action, VirtualTime

RETIRE_S = 1.0
"""An expert answers for so long after it was retired: longer than any live gateway is behind."""

Reply = Callable[[frozenset[ExpertKey], bool], None]
"""Told which experts failed to load, and whether the order was refused."""


@dataclass(frozen=True)
class Rows:
    """Rows of one layer, for some experts."""

    layer: int
    row_ids: dict[int, tuple[int, ...]]
    """Expert to rows."""


@dataclass
class _Job:
    """An order to load."""

    left: deque[ExpertKey]
    reply: Reply
    failed: set[ExpertKey] = field(default_factory=set)


@dataclass(frozen=True)
class Observers:
    """Who hears of a simulated worker."""

    on_change: Callable[[SimulatedWorker], None]
    """What it holds, or that it is leaving, has changed."""
    on_retire: Callable[[SimulatedWorker, ExpertKey, float], None]
    """It is about to give up an expert, as it was told at that time."""
    on_end: Callable[[SimulatedWorker], None]
    """It has ended by itself."""


class SimulatedWorker:
    """One incarnation.

    Args:
        clock: The time.
        worker_id: Its name.
        incarnation: Larger than any before.
        node: Its machine.
        num_slots: Experts that fit.
        load_s: Time to load one.
        cannot_load: Whether loading an expert fails, this time.
        observers: Who hears of it.
    """

    def __init__(
        self,
        clock: VirtualTime,
        worker_id: str,
        incarnation: int,
        node: str,
        num_slots: int,
        *,
        load_s: float,
        cannot_load: Callable[[], bool],
        observers: Observers,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.node = node
        self.num_slots = num_slots
        self.resident: set[ExpertKey] = set()
        self.retiring: set[ExpertKey] = set()
        self.alive = True
        self.hung = False
        self.leaving_since_s = float("inf")
        self.token_seen = 0
        self.awake_since_s = clock.now_s
        self._clock = clock
        self._load_s = load_s
        self._cannot_load = cannot_load
        self._observers = observers
        self._jobs: deque[_Job] = deque()
        self._deferred: list[Action] = []

    @property
    def leaving(self) -> bool:
        """True once it was told to stop."""
        return self.leaving_since_s < float("inf")

    @property
    def usable(self) -> bool:
        """True if it answers."""
        return self.alive and not self.hung

    def view(self) -> WorkerView:
        """What it says of itself."""
        return WorkerView(
            self.worker_id,
            self.incarnation,
            self.node,
            self.num_slots,
            frozenset(self.resident),
            frozenset(self.retiring),
            self.leaving,
        )

    def do(self, action: Action) -> None:
        """Does it now; later if it hangs, and not at all if it is dead."""
        if not self.alive:
            return
        if self.hung:
            self._deferred.append(action)
        else:
            action()

    def die(self) -> None:
        """Without a word."""
        self.alive = False

    def hang(self) -> None:
        """Does nothing any more, but keeps what it was told."""
        self.hung = True

    def go_on(self) -> None:
        """Does what it was told meanwhile."""
        self.hung = False
        self.awake_since_s = self._clock.now_s
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.do(action)

    def leave(self, grace_s: float) -> None:
        """It is told to stop: it ends when it holds nothing, or when its grace is over."""
        self.leaving_since_s = min(self.leaving_since_s, self._clock.now_s)
        self._observers.on_change(self)
        self._later(grace_s, self._end)
        self._end_if_empty()

    def obey(self, order: Order, token: int, given_s: float, reply: Reply) -> None:
        """Carries an order out that was given at some time, or refuses it."""
        stale = order.incarnation != self.incarnation or token < self.token_seen
        if stale or (self.leaving and order.kind == "load"):
            reply(frozenset(), True)
            return
        self.token_seen = token
        if order.kind == "load":
            self._load(order.experts, reply)
        else:
            self._unload(order.experts, given_s, reply)

    def answer(self, rows: Rows, reply: Callable[[Rows | None], None]) -> None:
        """Computes rows; None if it does not hold one of their experts."""
        held = self.resident | self.retiring
        missing = any((rows.layer, expert) not in held for expert in rows.row_ids)
        self._later(0.001 * len(rows.row_ids), lambda: reply(None if missing else rows))

    def _load(self, keys: Sequence[ExpertKey], reply: Reply) -> None:
        self._jobs.append(_Job(deque(keys), reply))
        if len(self._jobs) == 1:
            self._load_next()

    def _load_next(self) -> None:
        while self._jobs and not self._jobs[0].left:
            job = self._jobs.popleft()
            job.reply(frozenset(job.failed), False)
        if self._jobs:
            key = self._jobs[0].left[0]
            self._later(0.0 if self._is_held(key) else self._load_s, self._loaded)

    def _is_held(self, key: ExpertKey) -> bool:
        return key in self.resident or key in self.retiring

    def _loaded(self) -> None:
        job = self._jobs[0]
        key = job.left.popleft()
        full = len(self.resident | self.retiring) >= self.num_slots
        if not self._is_held(key) and (full or self._cannot_load()):
            job.failed.add(key)
        elif key not in self.resident:
            self.retiring.discard(key)
            self.resident.add(key)
            self._observers.on_change(self)
        self._load_next()

    def _unload(self, keys: Sequence[ExpertKey], given_s: float, reply: Reply) -> None:
        retired = [key for key in keys if key in self.resident]
        for key in retired:
            self._observers.on_retire(self, key, given_s)
            self.resident.discard(key)
            self.retiring.add(key)
        self._observers.on_change(self)

        def free() -> None:
            self.retiring.difference_update(retired)
            self._observers.on_change(self)
            reply(frozenset(), False)
            self._end_if_empty()

        self._later(RETIRE_S, free)

    def _end_if_empty(self) -> None:
        if self.leaving and not self.resident and not self.retiring:
            self._end()

    def _end(self) -> None:
        if self.alive:
            self.alive = False
            self._observers.on_end(self)

    def _later(self, delay_s: float, action: Action) -> None:
        self._clock.after(delay_s, lambda: self.do(action))
