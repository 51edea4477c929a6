"""Plans who should hold which expert: a pure function of what is there.

A plan changes as little as possible. It begins with what was planned before, or what is resident;
copies that are too many or too few are put right, workers get their shares; then, if it is worth
it, single experts are exchanged for load. What was planned once therefore stays planned until
workers or load change, also while it is half carried out.

Shapes: L MoE layers, E experts, W workers that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.placement.arrays import Bools, Floats, Ints, holds_of, keys_of, nodes_of, slots_of
from gateway.placement.balance import even_out, imbalance, slowest_L
from gateway.placement.eplb import pack
from gateway.placement.rendezvous import pair_scores
from gateway.placement.repair import Site, repaired
from gateway.placement.state import (
    ExpertLoad,
    Experts,
    Placement,
    PlacementPolicy,
    Plan,
    WorkerView,
)
from gateway.placement.wanted_copies import usable_slots, wanted_copies

_LEAST_LOAD = 1e-9


def plan(
    experts: Experts,
    workers: Sequence[WorkerView],
    load: ExpertLoad,
    policy: PlacementPolicy,
    aim: Placement | None = None,
) -> Plan:
    """Makes a plan.

    Args:
        experts: What there is to place.
        workers: Where; those that are leaving get nothing.
        load: Of each expert, of late.
        policy: How much to move, and for what.
        aim: Target of the plan before, if it was made by this leader; None for what is resident.
    """
    stay = sorted((w for w in workers if not w.leaving), key=lambda worker: worker.worker_id)
    load_LE = load + max(policy.prior_pairs, _LEAST_LOAD)
    site = _site(experts, stay, policy)
    start_LEW = _start(experts, stay, aim)
    copies_LE = wanted_copies(load_LE, start_LEW.sum(axis=2), site.slots_W, policy)
    shared_LEW, room_LW = repaired(site, start_LEW, copies_LE)
    balancer = _Balancer(site, load_LE, policy.gain)
    target_LEW = balancer.balanced(shared_LEW, room_LW) if load.any() else shared_LEW
    return _plan(experts, workers, stay, _Stages(site, load_LE, start_LEW, shared_LEW, target_LEW))


def _site(experts: Experts, stay: Sequence[WorkerView], policy: PlacementPolicy) -> Site:
    min_copies = min(policy.min_copies, len(stay))
    scores_LEW = pair_scores(experts, stay)
    scores_LEW[holds_of(experts, [view.failed for view in stay])] = -np.inf
    return Site(
        scores_LEW=scores_LEW,
        slots_W=usable_slots(slots_of(stay), experts.num_pairs, min_copies),
        nodes_W=nodes_of(stay),
        there_W=np.array([not view.absent for view in stay], dtype=np.bool_),
        resident_LEW=holds_of(experts, [() if w.absent else w.resident for w in stay]),
        retiring_LEW=holds_of(experts, [() if w.absent else w.retiring for w in stay]),
    )


def _start(experts: Experts, stay: Sequence[WorkerView], aim: Placement | None) -> Bools:
    """[L, E, W] what was aimed at, or of workers that were not part of it, what they hold."""
    known = aim or {}
    return holds_of(
        experts, [known.get(view.worker_id, view.resident) - view.failed for view in stay]
    )


@dataclass(frozen=True)
class _Balancer:
    """Exchanges experts for load if enough is gained by it."""

    site: Site
    load_LE: Floats
    gain: float

    def balanced(self, holds_LEW: Bools, room_LW: Ints) -> Bools:
        """[L, E, W] with less on the busiest workers.

        Args:
            holds_LEW: What would be without.
            room_LW: How many more experts fit on each worker.
        """
        mean_L = self.load_LE.sum(axis=1) / max(len(self.site.slots_W), 1)
        now_L = slowest_L(self.load_LE, holds_LEW)
        # No placement is better than even load, so nothing has to be packed to know this.
        if not self.site.there_W.all() or not self._is_worth_it(now_L, mean_L):
            return holds_LEW
        best_L = np.maximum(self._packed_L(holds_LEW), mean_L)
        if not self._is_worth_it(now_L, best_L):
            return holds_LEW
        return self._moved(holds_LEW, room_LW, now_L, best_L)

    def _is_worth_it(self, now_L: Floats, best_L: Floats) -> bool:
        return bool(now_L.sum() > (1 + self.gain) * best_L.sum())

    def _packed_L(self, holds_LEW: Bools) -> Floats:
        """[L] load of the busiest worker if all were packed anew."""
        packed_LEW = pack(self.load_LE, holds_LEW.sum(axis=2), holds_LEW.sum(axis=1))
        return slowest_L(self.load_LE, packed_LEW)

    def _moved(self, holds_LEW: Bools, room_LW: Ints, now_L: Floats, best_L: Floats) -> Bools:
        # Half of the gain is a margin: what was evened out is left alone for some time.
        good_enough_L = (1 + self.gain / 2) * best_L
        holds_LEW = holds_LEW.copy()
        for layer in np.flatnonzero(now_L > good_enough_L):
            holds_LEW[layer] = even_out(
                self.load_LE[layer],
                holds_LEW[layer],
                self.site.nodes_W,
                room_LW[layer],
                float(good_enough_L[layer]),
            )
        return holds_LEW


@dataclass(frozen=True)
class _Stages:
    """How a plan came about."""

    site: Site
    load_LE: Floats
    start_LEW: Bools
    shared_LEW: Bools
    target_LEW: Bools


def _plan(
    experts: Experts,
    workers: Sequence[WorkerView],
    stay: Sequence[WorkerView],
    stages: _Stages,
) -> Plan:
    there = [view for view in workers if not view.absent]
    resident_LEW = holds_of(experts, [view.resident for view in there])
    uncovered_LE = resident_LEW.sum(axis=2) == 0
    target_LEW = stages.target_LEW
    target = {
        view.worker_id: frozenset(keys_of(experts, target_LEW[:, :, worker]))
        for worker, view in enumerate(stay)
    }
    return Plan(
        target,
        uncovered=tuple(keys_of(experts, uncovered_LE)),
        unplaced=tuple(keys_of(experts, target_LEW.sum(axis=2) == 0)),
        imbalance_before=_imbalance(stages.load_LE, resident_LEW, len(stay)),
        imbalance_after=_imbalance(stages.load_LE, target_LEW, len(stay)),
        why=_why(stages, int(uncovered_LE.sum()), [w.worker_id for w in workers if w.leaving]),
    )


def _imbalance(load_LE: Floats, holds_LEW: Bools, num_workers: int) -> float:
    covered_LE = load_LE * holds_LEW.any(axis=2)
    return imbalance(covered_LE, slowest_L(covered_LE, holds_LEW), num_workers)


def _why(stages: _Stages, num_uncovered: int, leaving: Sequence[str]) -> str:
    """What is to be done and for which reason, for people; empty for nothing."""
    target_LEW, resident_LEW = stages.target_LEW, stages.site.resident_LEW
    loads_LEW = target_LEW & ~resident_LEW
    missing_LE = np.maximum(target_LEW.sum(axis=2) - resident_LEW.sum(axis=2), 0)
    num_for_load = int((target_LEW & ~stages.shared_LEW).sum())
    num_moves = int(loads_LEW.sum() - missing_LE.sum())
    reasons = (
        (num_uncovered, f"{num_uncovered} experts have no copy"),
        (missing_LE.any(), f"{missing_LE.sum()} copies are missing"),
        (len(leaving), f"{', '.join(leaving)} leaving"),
        (num_moves, f"{num_moves} copies are to move"),
        (num_for_load, f"{num_for_load} of these for load"),
    )
    return ", ".join(text for holds, text in reasons if holds)
