"""How many copies of each expert there should be, for safety and for load.

Shapes: L MoE layers, E experts, W workers.
"""

from __future__ import annotations

import numpy as np

from gateway.placement.arrays import Floats, Ints
from gateway.placement.eplb import replicate
from gateway.placement.state import PlacementPolicy


def usable_slots(slots_W: Ints, num_pairs: int, min_copies: int) -> Ints:
    """[W] slots that may be planned with.

    One of each worker stays free for moves, since a copy is added before another is given up; but
    not where copies that are asked for would lack it.

    Args:
        slots_W: Of each worker.
        num_pairs: (layer, expert) pairs of the model.
        min_copies: Copies of each that are asked for.
    """
    slots_W = np.minimum(slots_W, num_pairs)
    with_one_free_W = np.where(slots_W < num_pairs, np.maximum(slots_W - 1, 0), slots_W)
    for num_copies in (min_copies, 1):
        needed = num_pairs * num_copies
        if with_one_free_W.sum() >= needed:
            return with_one_free_W
        if slots_W.sum() >= needed:
            return slots_W
    return slots_W


def wanted_copies(load_LE: Floats, held_LE: Ints, slots_W: Ints, policy: PlacementPolicy) -> Ints:
    """[L, E] copies of each expert; 0 where there are not even slots for one of each.

    At least `policy.min_copies` on as many workers; an expert whose copies would each be more than
    a worker's share of the layer's load gets further ones.

    Args:
        load_LE: Of each expert, above 0.
        held_LE: Copies that there are.
        slots_W: That may be planned with.
        policy: What is asked for.
    """
    num_layers, num_experts = load_LE.shape
    num_workers = int((slots_W > 0).sum())
    num_copies = int(slots_W.sum()) // max(num_layers, 1)
    if num_copies < num_experts:
        return _first_copies(load_LE, held_LE, num_copies)
    one_LE = np.ones_like(held_LE)
    always_L = np.full(num_layers, -np.inf)
    safe = min(policy.min_copies, num_workers)
    gain = 2 * policy.gain
    if num_copies >= safe * num_experts:
        safe_LE = safe * one_LE
    else:
        safe_LE = replicate(load_LE, one_LE, safe, num_copies, always_L, held_LE, gain)
    share_L = load_LE.sum(axis=1) / num_workers
    return replicate(load_LE, safe_LE, num_workers, num_copies, share_L, held_LE, gain)


def _first_copies(load_LE: Floats, held_LE: Ints, num_copies: int) -> Ints:
    """One copy for as many as there can be: those that have one, then by load."""
    copies_LE = np.zeros_like(held_LE)
    for layer, (load_E, held_E) in enumerate(zip(load_LE, held_LE, strict=True)):
        # lexsort's last key is the first criterion.
        copies_LE[layer, np.lexsort((-load_E, held_E == 0))[:num_copies]] = 1
    return copies_LE
