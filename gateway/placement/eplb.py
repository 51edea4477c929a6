"""How many copies each expert needs for its load, and which copies belong together.

After DeepSeek's expert parallelism load balancer (EPLB, 2025, as published with DeepSeek-V3,
arXiv:2412.19437): spare slots go, one by one, to the expert with the largest load per copy; then
copies, heaviest first, go to the worker with the least load that has room. Here all layers are done
at once, workers may have different room, and no worker gets two copies of an expert.

Shapes: L MoE layers, E experts, W workers.
"""

from __future__ import annotations

import numpy as np

from gateway.placement.arrays import Bools, Floats, Ints


def replicate(
    load_LE: Floats,
    copies_LE: Ints,
    most: int,
    num_copies: int,
    enough_L: Floats,
    held_LE: Ints,
    gain: float,
) -> Ints:
    """[L, E] copies of each expert, at least those given.

    Args:
        load_LE: Of each expert.
        copies_LE: Where to start, at least 1 each.
        most: Copies of an expert at most, as there are no more workers.
        num_copies: Of all experts of a layer together, at most.
        enough_L: Load per copy that needs no further copy.
        held_LE: Copies that there are: these are kept at a load that is lower by `gain`, so that
            none comes and goes with the noise of measurement.
        gain: See there; 0.1 for 10 %.
    """
    copies_LE = copies_LE.copy()
    layers_L = np.arange(len(load_LE))
    while True:
        sticky_LE = np.where(copies_LE < held_LE, (1 + gain) * load_LE, load_LE)
        per_copy_LE = np.where(copies_LE < most, sticky_LE / copies_LE, -np.inf)
        hottest_L = per_copy_LE.argmax(axis=1)
        grows_L = per_copy_LE[layers_L, hottest_L] > enough_L
        grows_L &= copies_LE.sum(axis=1) < num_copies
        if not grows_L.any():
            return copies_LE
        copies_LE[layers_L[grows_L], hottest_L[grows_L]] += 1


def pack(load_LE: Floats, copies_LE: Ints, room_LW: Ints) -> Bools:
    """[L, E, W] which workers hold copies of which expert, for even load.

    Args:
        load_LE: Of each expert, shared evenly by its copies.
        copies_LE: Of each expert.
        room_LW: Experts that fit on each worker; what does not fit is left out.
    """
    num_layers, num_experts = load_LE.shape
    per_copy_LE = load_LE / np.maximum(copies_LE, 1)
    heaviest_first_LE = np.argsort(-per_copy_LE, axis=1, kind="stable")
    holds_LEW = np.zeros((num_layers, num_experts, room_LW.shape[1]), dtype=np.bool_)
    sum_LW = np.zeros(room_LW.shape)
    room_LW = room_LW.copy()
    layers_L = np.arange(num_layers)
    for rank in range(num_experts):
        experts_L = heaviest_first_LE[:, rank]
        for copy in range(int(copies_LE[layers_L, experts_L].max(initial=0))):
            fits_LW = (room_LW > 0) & ~holds_LEW[layers_L, experts_L]
            fits_LW &= (copies_LE[layers_L, experts_L] > copy)[:, None]
            workers_L = np.where(fits_LW, sum_LW, np.inf).argmin(axis=1)
            fit_L = fits_LW[layers_L, workers_L]
            layers, experts, workers = layers_L[fit_L], experts_L[fit_L], workers_L[fit_L]
            holds_LEW[layers, experts, workers] = True
            room_LW[layers, workers] -= 1
            sum_LW[layers, workers] += per_copy_LE[layers, experts]
    return holds_LEW
