"""What expert workers are told to do next, so that the plan comes true.

Copies are added before others are given up, and everything is decided from what workers report
now, so that it does not matter who gave earlier orders or whether they were carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.placement.move_budget import MoveBudget
from gateway.placement.state import ExpertKey, Order, PlacementPolicy, Plan, WorkerView

_MOST_ORDERS = 2
"""Orders of a kind that a worker may have: the next one waits there while one is carried out."""


def next_orders(
    plan: Plan,
    workers: Sequence[WorkerView],
    pending: Sequence[Order],
    policy: PlacementPolicy,
    now_s: float,
    budget: MoveBudget,
) -> list[Order]:
    """Orders that can be given now; at most one of each kind to each worker.

    Loads of experts that nobody or only leaving workers hold come first and ask no budget, then
    those of missing copies, then those for balance. An expert is unloaded where it is not planned
    once as many copies as planned can be used elsewhere; where a load has no slot, one copy
    elsewhere is enough. Copies that an earlier leader may still have unloaded do not count. Wrong
    copies are of no use to anybody, and are unloaded at once.

    Args:
        plan: What is wanted, made for these workers.
        workers: As they are now; absent ones get no orders.
        pending: Orders that were given and have not ended, of any incarnation.
        policy: Limits.
        now_s: On a monotonic clock.
        budget: Of bytes; what is ordered is taken from it.
    """
    states = [_worker_state(view, plan, pending) for view in workers if not view.absent]
    copies = _Copies.count(plan, states)
    _order_loads(states, copies, policy, lambda: budget.take(now_s))
    _order_unloads(states, copies)
    return [order for state in states for order in state.orders()]


@dataclass
class _WorkerState:
    """One worker, and what it is told."""

    view: WorkerView
    target: frozenset[ExpertKey]
    loading: set[ExpertKey] = field(default_factory=set)
    """Ordered, not resident yet."""
    unloading: set[ExpertKey] = field(default_factory=set)
    """Ordered, perhaps still resident."""
    may_load: bool = True
    may_unload: bool = True
    loads: list[ExpertKey] = field(default_factory=list)
    unloads: list[ExpertKey] = field(default_factory=list)
    blocked: set[ExpertKey] = field(default_factory=set)
    """Loads that found no free slot."""
    num_free: int = field(init=False)
    """Free slots."""

    def __post_init__(self) -> None:
        view = self.view
        self.num_free = view.num_slots - len(view.resident | view.retiring | self.loading)

    @property
    def usable(self) -> frozenset[ExpertKey]:
        """What is resident, and was not ordered to go."""
        return self.view.resident - self.unloading

    def wanted(self) -> list[ExpertKey]:
        """What is planned, and neither here nor coming. What is about to retire is waited for."""
        return sorted(self.target - self.view.resident - self.view.failed - self.loading)

    def takes(self, key: ExpertKey, policy: PlacementPolicy) -> bool:
        """True if the expert can be ordered now; one that is retiring has a slot."""
        if len(self.loading) >= policy.loads_at_a_time:
            return False
        if self.num_free <= 0 and key not in self.view.retiring:
            self.blocked.add(key)
            return False
        return True

    def num_lacking(self) -> int:
        """Slots that loads wait for and that nothing is about to free."""
        in_memory = self.view.resident | self.view.retiring
        return len(self.blocked) - len(self.view.retiring | (self.unloading & in_memory))

    def wrong_in_memory(self) -> frozenset[ExpertKey]:
        """Copies with wrong bytes that nobody has ordered to go."""
        return (self.view.wrong & self.view.retiring) - self.unloading

    def load(self, key: ExpertKey) -> None:
        if key not in self.view.retiring:
            self.num_free -= 1
        self.blocked.discard(key)
        self.loads.append(key)
        self.loading.add(key)

    def unload(self, key: ExpertKey) -> None:
        self.unloads.append(key)
        self.unloading.add(key)

    def orders(self) -> Iterable[Order]:
        name, incarnation = self.view.worker_id, self.view.incarnation
        if self.loads:
            yield Order("load", name, incarnation, tuple(self.loads))
        if self.unloads:
            yield Order("unload", name, incarnation, tuple(self.unloads))


def _worker_state(view: WorkerView, plan: Plan, pending: Sequence[Order]) -> _WorkerState:
    identity = (view.worker_id, view.incarnation)
    mine = [order for order in pending if (order.worker_id, order.incarnation) == identity]
    ordered = {kind: [o for o in mine if o.kind == kind] for kind in ("load", "unload")}
    return _WorkerState(
        view,
        plan.target.get(view.worker_id, frozenset()),
        loading={key for order in ordered["load"] for key in order.experts} - view.resident,
        unloading={key for order in ordered["unload"] for key in order.experts},
        may_load=not view.leaving and len(ordered["load"]) < _MOST_ORDERS,
        may_unload=len(ordered["unload"]) < _MOST_ORDERS,
    )


@dataclass
class _Copies:
    """Copies of each expert, on workers that stay."""

    planned: dict[ExpertKey, int]
    usable: Counter[ExpertKey]
    coming: Counter[ExpertKey]
    safe: Counter[ExpertKey]
    """Usable, and nobody else can have them unloaded."""

    @staticmethod
    def count(plan: Plan, states: Sequence[_WorkerState]) -> _Copies:
        staying = [state for state in states if not state.view.leaving]
        usable = Counter(key for state in staying for key in state.usable)
        coming = Counter(key for state in staying for key in state.loading)
        safe = Counter(key for state in staying if state.view.fenced for key in state.usable)
        return _Copies(plan.num_copies(), usable, coming, safe)

    def num_soon(self, key: ExpertKey) -> int:
        return self.usable[key] + self.coming[key]

    def elsewhere(self, state: _WorkerState, key: ExpertKey) -> int:
        """Safe copies on other workers."""
        return self.safe[key] - int(state.view.fenced and not state.view.leaving)

    def give_up(self, state: _WorkerState, key: ExpertKey) -> None:
        """A worker will lose its copy."""
        if not state.view.leaving:
            self.usable[key] -= 1
            self.safe[key] -= int(state.view.fenced)


def _order_loads(
    states: Sequence[_WorkerState],
    copies: _Copies,
    policy: PlacementPolicy,
    may_move: Callable[[], bool],
) -> None:
    """Fills the lists of loads, by urgency."""
    wanted = _by_turns([(state, state.wanted()) for state in states if state.may_load])
    _order_urgent_loads(wanted, copies, policy)

    def is_missing(key: ExpertKey) -> bool:
        return copies.num_soon(key) < min(policy.min_copies, copies.planned[key])

    for belongs in (is_missing, lambda key: True):
        for state, key in wanted:
            if key in state.loading or not belongs(key) or not state.takes(key, policy):
                continue
            if key not in state.view.retiring and not may_move():
                return  # what follows is less urgent still
            state.load(key)
            copies.coming[key] += 1


def _order_urgent_loads(
    wanted: Sequence[tuple[_WorkerState, ExpertKey]], copies: _Copies, policy: PlacementPolicy
) -> None:
    """Experts that have no copy on workers that stay: each where it is loaded soonest."""
    wanted_by: dict[ExpertKey, list[_WorkerState]] = {}
    for state, key in wanted:
        if copies.num_soon(key) == 0:
            wanted_by.setdefault(key, []).append(state)
    for key, states in wanted_by.items():
        able = [state for state in states if state.takes(key, policy)]
        if able:
            min(able, key=lambda state: len(state.loading)).load(key)
            copies.coming[key] += 1


def _by_turns(
    lists: Sequence[tuple[_WorkerState, list[ExpertKey]]],
) -> list[tuple[_WorkerState, ExpertKey]]:
    """One expert of each worker, then the next of each."""
    longest = max((len(keys) for _, keys in lists), default=0)
    return [(s, keys[i]) for i in range(longest) for s, keys in lists if i < len(keys)]


def _order_unloads(states: Sequence[_WorkerState], copies: _Copies) -> None:
    """Fills the lists of unloads."""
    for state in states:
        if not state.may_unload:
            continue
        for key in sorted(state.wrong_in_memory()):
            state.unload(key)
        num_lacking = state.num_lacking()
        for key in sorted(state.usable - state.target - set(state.loads)):
            others = copies.elsewhere(state, key)
            makes_room = num_lacking > 0 and others >= 1 and not copies.coming[key]
            if others < max(1, copies.planned.get(key, 0)) and not makes_room:
                continue
            num_lacking -= 1
            state.unload(key)
            copies.give_up(state, key)
