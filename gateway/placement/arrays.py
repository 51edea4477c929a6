"""Types of arrays, and workers and placements as arrays.

Shapes: L MoE layers, E experts, W workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gateway.placement.state import ExpertKey, Experts, WorkerView

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def slots_of(workers: Sequence[WorkerView]) -> Ints:
    """[W] their slots."""
    return np.array([view.num_slots for view in workers], dtype=np.int64)


def nodes_of(workers: Sequence[WorkerView]) -> Ints:
    """[W] a number for each node, from 0."""
    number = {name: i for i, name in enumerate(sorted({view.node for view in workers}))}
    return np.array([number[view.node] for view in workers], dtype=np.int64)


def holds_of(experts: Experts, keys: Sequence[Iterable[ExpertKey]]) -> Bools:
    """[L, E, W] from the experts of each worker."""
    slot_of = {layer: slot for slot, layer in enumerate(experts.moe_layers)}
    holds_LEW = np.zeros((len(slot_of), experts.num_experts, len(keys)), dtype=np.bool_)
    for worker, mine in enumerate(keys):
        slots = [slot_of[layer] for layer, _ in mine]
        holds_LEW[slots, [expert for _, expert in mine], worker] = True
    return holds_LEW


def keys_of(experts: Experts, holds_LE: Bools) -> list[ExpertKey]:
    """(layer, expert) where the array is true, ascending."""
    slots, numbers = np.nonzero(holds_LE)
    layers = [experts.moe_layers[slot] for slot in slots.tolist()]
    return sorted(zip(layers, numbers.tolist(), strict=True))
