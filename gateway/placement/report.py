"""What operators see of the placement: who holds what, what is planned, and what is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from gateway.placement.arrays import holds_of
from gateway.placement.balance import imbalance, slowest_L
from gateway.placement.order_calls import OrderEnd
from gateway.placement.state import (
    ExpertKey,
    ExpertLoad,
    Experts,
    Order,
    PlacementPolicy,
    Plan,
    WorkerView,
)

Json = dict[str, object]


@dataclass(frozen=True)
class MoveCounts:
    """What became of orders since the gateway started: experts of each."""

    loaded: int = 0
    unloaded: int = 0
    failed: int = 0

    def with_end(self, end: OrderEnd) -> MoveCounts:
        """These and an order that has ended; what was lost is not counted."""
        if end.is_lost:
            return self
        done, failed = len(end.order.experts) - len(end.failed), self.failed + len(end.failed)
        if end.order.kind == "load":
            return replace(self, loaded=self.loaded + done, failed=failed)
        return replace(self, unloaded=self.unloaded + done, failed=failed)


@dataclass(frozen=True)
class PlacementReport:
    """The placement at one moment."""

    experts: Experts
    policy: PlacementPolicy
    token: int | None = None
    """Fencing token of this gateway; None if it does not lead."""
    workers: tuple[WorkerView, ...] = ()
    plan: Plan | None = None
    pending: tuple[Order, ...] = ()
    load: ExpertLoad | None = field(default=None, repr=False)
    moved: MoveCounts = MoveCounts()

    @cached_property
    def num_copies(self) -> Counter[ExpertKey]:
        """Usable copies of each expert that has any."""
        there = (view for view in self.workers if not view.absent)
        return Counter(key for view in there for key in view.resident)

    def fewest_copies(self) -> int:
        """Usable copies of the expert that has least."""
        copies = self.num_copies
        is_whole = len(copies) == self.experts.num_pairs
        return min(copies.values(), default=0) if is_whole else 0

    def num_coming(self, keys: Collection[ExpertKey]) -> int:
        """How many of some experts expert workers have been told to load."""
        loads = (order for order in self.pending if order.kind == "load")
        return len(set(keys) & {key for order in loads for key in order.experts})

    @cached_property
    def moves(self) -> tuple[tuple[str, ExpertKey, str], ...]:
        """What the plan adds and takes away: `load` or `unload`, expert, worker."""
        target = {} if self.plan is None else self.plan.target
        return tuple(
            (kind, key, view.worker_id)
            for view in self.workers
            if not view.absent
            for kind, keys in (
                ("load", target.get(view.worker_id, frozenset()) - view.resident),
                ("unload", view.resident - target.get(view.worker_id, frozenset())),
            )
            for key in sorted(keys)
        )

    def imbalance(self) -> float:
        """Time of the slowest worker to the mean, over all layers, with what is resident now."""
        if self.load is None or not self.workers:
            return 1.0
        load_LE = self.load + self.policy.prior_pairs
        there = [view for view in self.workers if not view.absent]
        holds_LEW = holds_of(self.experts, [view.resident for view in there])
        covered_LE = load_LE * holds_LEW.any(axis=2)
        return imbalance(covered_LE, slowest_L(covered_LE, holds_LEW), len(there))

    def to_json(self) -> Json:
        """For the admin API."""
        copies = self.num_copies
        return {
            "leader": self.token is not None,
            "token": self.token,
            "min_copies": self.policy.min_copies,
            "num_experts": self.experts.num_pairs,
            "num_covered": len(copies),
            "num_copies": sum(copies.values()),
            "fewest_copies": self.fewest_copies(),
            "imbalance": self.imbalance(),
            "workers": [self._worker(view) for view in self.workers],
            "orders": [_order(order) for order in self.pending],
            "plan": self._plan(),
        }

    def _worker(self, view: WorkerView) -> Json:
        target = frozenset() if self.plan is None else self.plan.target.get(view.worker_id, ())
        return {
            "worker_id": view.worker_id,
            "node": view.node,
            "state": "absent" if view.absent else "leaving" if view.leaving else "ready",
            "expert_slots": view.num_slots,
            "resident": _by_layer(view.resident),
            "retiring": _by_layer(view.retiring),
            "wrong": _by_layer(view.wrong),
            "planned": _by_layer(target),
        }

    def _plan(self) -> Json | None:
        if self.plan is None:
            return None
        return {
            "why": self.plan.why,
            "uncovered": [list(key) for key in self.plan.uncovered],
            "unplaced": [list(key) for key in self.plan.unplaced],
            "imbalance_before": self.plan.imbalance_before,
            "imbalance_after": self.plan.imbalance_after,
            "moves": [
                {"kind": kind, "layer": key[0], "expert": key[1], "worker_id": worker_id}
                for kind, key, worker_id in self.moves
            ],
        }


def _by_layer(keys: Iterable[ExpertKey]) -> dict[str, list[int]]:
    layers: dict[str, list[int]] = {}
    for layer, expert in sorted(keys):
        layers.setdefault(str(layer), []).append(expert)
    return layers


def _order(order: Order) -> Json:
    return {
        "kind": order.kind,
        "worker_id": order.worker_id,
        "num_experts": len(order.experts),
    }
