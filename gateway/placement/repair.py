"""Turns who holds what into who should, with as few changes as will do.

Shapes: L MoE layers, E experts, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gateway.placement.arrays import Bools, Floats, Ints
from gateway.placement.rendezvous import fair_shares, place_copies

_IN_MEMORY_BONUS = 1000.0
"""More than scores differ: what is in memory already is preferred to any score."""


@dataclass(frozen=True)
class Site:
    """Workers that stay, as arrays."""

    scores_LEW: Floats
    slots_W: Ints
    """That may be planned with."""
    nodes_W: Ints
    there_W: Bools
    """False for absent workers."""
    resident_LEW: Bools
    """What can be used."""
    retiring_LEW: Bools
    """What is in memory still, and need not be read to be used again."""

    def preferences_LEW(self) -> Floats:
        """[L, E, W] scores, but what is in memory comes first."""
        return self.scores_LEW + _IN_MEMORY_BONUS * (self.resident_LEW | self.retiring_LEW)


def repaired(site: Site, holds_LEW: Bools, copies_LE: Ints) -> tuple[Bools, Ints]:
    """Who should hold what, and [L, W] experts that each worker still has room for.

    Copies that are too many are dropped, workers that hold more than their share of a layer give
    some up, and what is missing is placed. Nothing else changes.

    Args:
        site: The workers.
        holds_LEW: What is planned so far, or resident.
        copies_LE: How many copies there should be.
    """
    holds_LEW = holds_LEW.copy()
    preferences_LEW = site.preferences_LEW()
    num_experts = copies_LE.shape[1]
    shares_LW = fair_shares(copies_LE.sum(axis=1), site.slots_W, num_experts, holds_LEW.sum(axis=1))
    if not site.there_W.all():
        _cover(site, holds_LEW, copies_LE, preferences_LEW)
    for layer, holds_EW in enumerate(holds_LEW):
        share_W, copies_E = shares_LW[layer], copies_LE[layer]
        if _is_right(holds_EW, copies_E, share_W):
            continue
        work = _Layer(site, holds_EW, copies_E, share_W, preferences_LEW[layer])
        work.drop_excess(site.resident_LEW[layer])
        work.give_up_surplus(site.resident_LEW[layer])
        room_W = np.maximum(share_W - holds_EW.sum(axis=0), 0)
        missing_E = np.maximum(copies_E - holds_EW.sum(axis=1), 0)
        place_copies(missing_E, room_W, holds_EW, preferences_LEW[layer], site.nodes_W)
    return holds_LEW, np.maximum(shares_LW - holds_LEW.sum(axis=1), 0)


def _is_right(holds_EW: Bools, copies_E: Ints, share_W: Ints) -> bool:
    as_many = np.array_equal(holds_EW.sum(axis=1), copies_E)
    return as_many and bool((holds_EW.sum(axis=0) <= share_W).all())


def _cover(site: Site, holds_LEW: Bools, copies_LE: Ints, preferences_LEW: Floats) -> None:
    """Experts that only absent workers hold get a copy on a worker that is there."""
    slots_W = np.where(site.there_W, site.slots_W, 0)
    lost_LE = ~holds_LEW[:, :, site.there_W].any(axis=2) & (copies_LE > 0)
    held_LW = holds_LEW.sum(axis=1)
    num_layers, num_experts = copies_LE.shape
    num_slots = min(int(slots_W.sum()) // max(num_layers, 1), num_experts)
    room_LW = fair_shares(np.full(num_layers, num_slots), slots_W, num_experts, held_LW)
    for layer in np.flatnonzero(lost_LE.any(axis=1)):
        holds_EW = holds_LEW[layer]
        holds_EW[lost_LE[layer]] = False
        room_W = np.where(site.there_W, np.maximum(room_LW[layer], 1), 0)
        place_copies(
            lost_LE[layer].astype(np.int64), room_W, holds_EW, preferences_LEW[layer], site.nodes_W
        )


@dataclass
class _Layer:
    """One layer that is not as it should be; `holds_EW` is changed."""

    site: Site
    holds_EW: Bools
    copies_E: Ints
    share_W: Ints
    preferences_EW: Floats

    def drop_excess(self, resident_EW: Bools) -> None:
        """Copies that are too many go: first what is not in memory, then where most are held."""
        for expert in np.flatnonzero(self.holds_EW.sum(axis=1) > self.copies_E):
            holders = np.flatnonzero(self.holds_EW[expert])
            over_W = self.holds_EW.sum(axis=0) - self.share_W
            order = np.lexsort(
                (
                    self.preferences_EW[expert, holders],
                    -over_W[holders],
                    resident_EW[expert, holders] & self.site.there_W[holders],
                )
            )
            num_excess = len(holders) - int(self.copies_E[expert])
            self.holds_EW[expert, holders[order[:num_excess]]] = False

    def give_up_surplus(self, resident_EW: Bools) -> None:
        """Workers with more than their share give up what suits workers with room best."""
        for worker in np.flatnonzero(self.holds_EW.sum(axis=0) > self.share_W).tolist():
            num_held_W = self.holds_EW.sum(axis=0)
            mine = np.flatnonzero(self._may_leave(worker))
            open_EW = ~self.holds_EW[mine] & (num_held_W < self.share_W)
            suits = np.where(open_EW, self.preferences_EW[mine], -np.inf).max(axis=1)
            same_node_W = self.site.nodes_W == self.site.nodes_W[worker]
            crowded = self.holds_EW[mine][:, same_node_W].sum(axis=1) > 1
            given_up = self.holds_EW[mine].sum(axis=1) < self.copies_E[mine]
            # lexsort's last key is the first criterion.
            order = np.lexsort((-suits, ~crowded, resident_EW[mine, worker], given_up))
            num_surplus = int(num_held_W[worker] - self.share_W[worker])
            self.holds_EW[mine[order[:num_surplus]], worker] = False

    def _may_leave(self, worker: int) -> Bools:
        """[E] what the worker may give up: not what only absent workers hold besides."""
        there_W = self.site.there_W
        if there_W.all():
            return self.holds_EW[:, worker]
        num_there_E = self.holds_EW[:, there_W].sum(axis=1)
        may_leave_E: Bools = self.holds_EW[:, worker] & ((num_there_E > 1) | ~there_W[worker])
        return may_leave_E
