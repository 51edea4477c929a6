"""One term of a placement leader: what it aims at, has ordered, and has seen fail.

It is told what is there and answers with orders; sending them is its caller's part. Nothing of it
outlives the term: the next leader plans from what workers report.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from gateway.placement.absences import Absences
from gateway.placement.move_budget import MoveBudget
from gateway.placement.orders import next_orders
from gateway.placement.plan import plan
from gateway.placement.state import (
    ExpertKey,
    ExpertLoad,
    Experts,
    Order,
    PlacementPolicy,
    Plan,
    WorkerView,
)

_FIRST_BACK_OFF_S = 1.0
_LONGEST_BACK_OFF_S = 60.0
_DOUBT_S = 60.0
"""How long an order to unload may still be carried out after its connection was lost."""
_REPLAN_S = 1.0
"""How old a plan may be if nothing but what is resident has changed."""
_Incarnation = tuple[str, int]
"""Worker id and incarnation."""


@dataclass
class _Failure:
    """An expert that an incarnation could not load."""

    back_off_s: float
    until_s: float


@dataclass
class _Seen:
    """What the present plan was made for."""

    workers: list[WorkerView] = field(default_factory=list)
    planned_at_s: float = -float("inf")
    balanced_at_s: float = -float("inf")

    def has_members_of(self, workers: Sequence[WorkerView]) -> bool:
        """True if these workers differ in what is resident alone."""
        return [_member(view) for view in workers] == [_member(view) for view in self.workers]


def _member(view: WorkerView) -> WorkerView:
    return replace(view, resident=frozenset(), retiring=frozenset(), fenced=False)


class Leader:
    """Owned by one thread.

    Args:
        experts: What there is to place.
        policy: How much to move, and for what.
        token: Fencing token of the term; its orders bear it, so that they are not taken for those
            of another term.

    Attributes:
        minds_load: False while load is not looked at: what was moved for it stays as it is.
    """

    def __init__(self, experts: Experts, policy: PlacementPolicy, token: int = 0) -> None:
        self.minds_load = True
        self._experts = experts
        self._token = token
        self._policy = policy
        self._absences = Absences(policy.lost_copy_patience_s)
        self._budget = MoveBudget(policy.bytes_per_minute, experts.expert_nbytes)
        self._load = experts.no_load()
        self._pending: list[Order] = []
        self._doubtful: list[tuple[Order, float]] = []
        """Orders to unload of which nobody knows whether they will be carried out; until when."""
        self._fenced: set[_Incarnation] = set()
        self._failures: dict[tuple[str, int, ExpertKey], _Failure] = {}
        self._seen = _Seen()
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The present plan; None before the first `advance`."""
        return self._plan

    @property
    def pending(self) -> Sequence[Order]:
        """Orders that were given and have not ended."""
        return tuple(self._pending)

    def rebalance(self) -> None:
        """Looks at the load with the next `advance`, however recent the last look is."""
        self._seen.balanced_at_s = -float("inf")

    def advance(self, workers: Sequence[WorkerView], load: ExpertLoad, now_s: float) -> list[Order]:
        """Orders to give now; each is pending until `ended` is called for it.

        Args:
            workers: All that are there.
            load: Of each expert, of late.
            now_s: On a monotonic clock.
        """
        self._forget(now_s)
        views = [self._view(view, now_s) for view in self._absences.observe(workers, now_s)]
        current = self._current_plan(views, load, now_s)
        given = [*self._pending, *(order for order, _ in self._doubtful)]
        orders = self._announcements(views)
        orders += next_orders(current, views, given, self._policy, now_s, self._budget)
        orders = [replace(order, token=self._token) for order in orders]
        self._pending.extend(orders)
        return orders

    def ended(self, order: Order, failed: Collection[ExpertKey], now_s: float) -> None:
        """A worker has carried an order out as far as it could, or has refused it.

        Args:
            order: One that was given.
            failed: Its experts that the worker said it could or would not load.
            now_s: On a monotonic clock.
        """
        self._pending.remove(order)
        self._fenced.add((order.worker_id, order.incarnation))
        for key in order.experts if order.kind == "load" else ():
            place = (order.worker_id, order.incarnation, key)
            if key not in failed:
                self._failures.pop(place, None)
                continue
            old = self._failures.get(place)
            back_off_s = min(2 * old.back_off_s, _LONGEST_BACK_OFF_S) if old else _FIRST_BACK_OFF_S
            self._failures[place] = _Failure(back_off_s, now_s + back_off_s)

    def lost(self, order: Order, now_s: float) -> None:
        """Nobody knows what becomes of an order, as its connection is lost.

        It may be on its way still, so what it unloads does not count as there for some time.

        Args:
            order: One that was given.
            now_s: On a monotonic clock.
        """
        self._pending.remove(order)
        if order.kind == "unload":
            self._doubtful.append((order, now_s + _DOUBT_S))

    def _announcements(self, views: Sequence[WorkerView]) -> list[Order]:
        """Empty orders to workers that have not heard of this leader."""
        asked = {(order.worker_id, order.incarnation) for order in self._pending}
        return [
            Order("load", view.worker_id, view.incarnation, ())
            for view in views
            if not (view.fenced or view.leaving or view.absent)
            and (view.worker_id, view.incarnation) not in asked
        ]

    def _forget(self, now_s: float) -> None:
        """Drops what is of no use any more."""
        self._doubtful = [(order, end_s) for order, end_s in self._doubtful if now_s < end_s]
        self._failures = {
            place: failure
            for place, failure in self._failures.items()
            if now_s < failure.until_s + _LONGEST_BACK_OFF_S
        }

    def _view(self, view: WorkerView, now_s: float) -> WorkerView:
        """A worker, with what this leader knows of it."""
        identity = (view.worker_id, view.incarnation)
        failed = {
            key
            for (*who, key), failure in self._failures.items()
            if tuple(who) == identity and now_s < failure.until_s
        }
        return replace(
            view,
            fenced=identity in self._fenced,
            failed=view.failed | (frozenset(failed) - view.resident),
        )

    def _current_plan(self, views: list[WorkerView], load: ExpertLoad, now_s: float) -> Plan:
        seen = self._seen
        look_at_load = now_s - seen.balanced_at_s >= self._policy.balance_every_s
        look_at_load = look_at_load and (self.minds_load or self._plan is None)
        if self._plan is not None and not look_at_load:
            # Targets don't follow from what is resident, once they are made. So a plan that is
            # being carried out is not made anew with each expert that is loaded.
            is_recent = now_s - seen.planned_at_s < _REPLAN_S and seen.has_members_of(views)
            if is_recent or views == seen.workers:
                self._plan = replace(self._plan, uncovered=self._uncovered(views))
                return self._plan
        if look_at_load:
            self._load = load
            seen.balanced_at_s = now_s
        seen.workers, seen.planned_at_s = views, now_s
        aim = None if self._plan is None else self._plan.target
        self._plan = plan(self._experts, views, self._load, self._policy, aim)
        return self._plan

    def _uncovered(self, views: Sequence[WorkerView]) -> tuple[ExpertKey, ...]:
        held = frozenset[ExpertKey]().union(*(v.resident for v in views if not v.absent))
        return tuple(sorted(self._experts.keys() - held))
