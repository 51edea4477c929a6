"""Base placement: weighted rendezvous hashing with a bounded number of experts per worker.

Each pair of worker and expert has a score, a hash weighted by the worker's slots [1]; an expert
goes to the workers with the best scores that have room in its layer. A layer waits for its slowest
worker, so room is shared out layer by layer, in proportion to slots. As scores depend on the pair
alone, a worker that joins or leaves moves little else than its own share.

Shapes: L MoE layers, E experts, W workers.

[1] Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998; weights as in
    Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gateway.placement.arrays import Bools, Floats, Ints, nodes_of, slots_of
from gateway.placement.state import Experts, WorkerView

_Words = npt.NDArray[np.uint64]

_ROUNDING = 1e-9


def pair_scores(experts: Experts, workers: Sequence[WorkerView]) -> Floats:
    """[L, E, W] how well each worker suits each expert; more is better, -inf for not at all."""
    layers_L = np.array(experts.moe_layers, dtype=np.uint64)
    keys_LE = (layers_L[:, None] << np.uint64(32)) | np.arange(experts.num_experts, dtype=np.uint64)
    seeds_W = np.array([_seed(view.worker_id) for view in workers], dtype=np.uint64)
    hashes_LEW = _mix(_mix(keys_LE)[:, :, None] ^ seeds_W)
    unit_LEW = ((hashes_LEW >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    with np.errstate(divide="ignore"):
        # The order of -weight / log(unit), and finite where that is huge.
        return np.log(slots_of(workers)) - np.log(-np.log(unit_LEW))


def fair_shares(num_copies_L: Ints, slots_W: Ints, num_experts: int, held_LW: Ints) -> Ints:
    """[L, W] how many experts of each layer each worker should hold.

    A worker's share is in proportion to its slots, at most one copy of each expert, and never more
    over all layers than it has slots. Of the fractions left over, those are rounded up first that
    let workers keep what they hold.

    Args:
        num_copies_L: Copies in each layer, over all workers.
        slots_W: Of each worker.
        num_experts: Of each layer.
        held_LW: Experts that workers hold now.
    """
    shares_LW = np.zeros((len(num_copies_L), len(slots_W)), dtype=np.int64)
    left_W = np.minimum(slots_W, len(num_copies_L) * num_experts)
    for layer, num_copies in enumerate(num_copies_L):
        most_W = np.minimum(left_W, num_experts)
        # In proportion to what is left, so that roundings do not add up and slots last.
        shares_LW[layer] = _shared_out(int(num_copies), left_W, most_W, held_LW[layer])
        left_W -= shares_LW[layer]
    return shares_LW


def place_copies(
    missing_E: Ints, room_W: Ints, holds_EW: Bools, scores_EW: Floats, nodes_W: Ints
) -> None:
    """Adds copies to one layer: the first of each expert, then the second, and so on.

    A copy goes to the worker with the best score among those with room, on a node without a copy if
    there is one. Where only a worker with a copy has room, another expert makes way by moving
    there.

    Args:
        missing_E: Copies to add of each expert.
        room_W: How many experts each worker may get; is used up.
        holds_EW: Who holds what; is added to.
        scores_EW: Of the layer.
        nodes_W: The node of each worker, as a number.
    """
    wanted_E = holds_EW.sum(axis=1) + missing_E
    for num_copies in range(1, int(wanted_E.max(initial=0)) + 1):
        rank_E = np.minimum(wanted_E, num_copies)
        _place_best(rank_E, room_W, holds_EW, scores_EW, nodes_W)
        _place_best(rank_E, room_W, holds_EW, scores_EW, np.arange(len(nodes_W)))
        _make_way(rank_E, room_W, holds_EW, scores_EW)


def base_placement(experts: Experts, workers: Sequence[WorkerView], num_copies: int) -> Bools:
    """[L, E, W] who holds what where nobody holds anything yet; slots may be too few for all.

    Args:
        experts: What there is to place.
        workers: Where.
        num_copies: Of each expert, at most the number of workers.
    """
    num_layers = len(experts.moe_layers)
    scores_LEW = pair_scores(experts, workers)
    slots_W, nodes_W = slots_of(workers), nodes_of(workers)
    num_slots = int(np.minimum(slots_W, experts.num_pairs).sum())
    per_layer = min(num_copies * experts.num_experts, num_slots // max(num_layers, 1))
    none_LW = np.zeros((num_layers, len(workers)), dtype=np.int64)
    num_copies_L = np.full(num_layers, per_layer)
    room_LW = fair_shares(num_copies_L, slots_W, experts.num_experts, none_LW)
    holds_LEW = np.zeros(scores_LEW.shape, dtype=np.bool_)
    missing_E = np.full(experts.num_experts, num_copies)
    for layer in range(num_layers):
        place_copies(missing_E, room_LW[layer], holds_LEW[layer], scores_LEW[layer], nodes_W)
    return holds_LEW


def _seed(worker_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest(), "little")


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); wraps around on purpose."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _shared_out(total: int, weights_W: Ints, most_W: Ints, held_W: Ints) -> Ints:
    """`total` in proportion to the weights, each at most `most`, in whole numbers."""
    exact_W = _proportional(total, weights_W, most_W)
    shares_W = np.floor(exact_W + _ROUNDING).astype(np.int64)
    fraction_W = exact_W - shares_W
    num_over = int(min(total, most_W.sum()) - shares_W.sum())
    may_grow_W = (fraction_W > _ROUNDING) & (shares_W < most_W)
    # lexsort's last key is the first criterion.
    order = np.lexsort((-fraction_W, held_W <= shares_W, ~may_grow_W))
    shares_W[order[:num_over]] += 1
    return shares_W


def _proportional(total: int, weights_W: Ints, most_W: Ints) -> Floats:
    """As fractions; what is above `most` goes to the others."""
    exact_W = np.zeros(len(weights_W))
    open_W = (weights_W > 0) & (most_W > 0)
    left = float(min(total, most_W.sum()))
    while left > _ROUNDING and open_W.any():
        share_W = np.where(open_W, weights_W * (left / weights_W[open_W].sum()), 0.0)
        full_W = open_W & (share_W >= most_W)
        if not full_W.any():
            return exact_W + share_W
        exact_W[full_W] = most_W[full_W]
        left -= float(most_W[full_W].sum())
        open_W &= ~full_W
    return exact_W


def _place_best(
    rank_E: Ints, room_W: Ints, holds_EW: Bools, scores_EW: Floats, groups_W: Ints
) -> None:
    """One copy for each expert that has fewer than `rank`, in a group without a copy of it."""
    short_E = holds_EW.sum(axis=1) < rank_E
    held_EG = _by_group(holds_EW, groups_W)
    free_EW = short_E[:, None] & (room_W > 0) & ~held_EG[:, groups_W] & (scores_EW > -np.inf)
    experts, workers = np.nonzero(free_EW)
    best_first = np.argsort(-scores_EW[experts, workers], kind="stable")
    room = room_W.tolist()
    done = (~short_E).tolist()
    for index in best_first.tolist():
        expert, worker = int(experts[index]), int(workers[index])
        if done[expert] or room[worker] == 0:
            continue
        done[expert] = True
        room[worker] -= 1
        holds_EW[expert, worker] = True
    room_W[:] = room


def _by_group(holds_EW: Bools, groups_W: Ints) -> Bools:
    """[E, groups] whether a worker of the group holds the expert."""
    held_EG = np.zeros((len(holds_EW), int(groups_W.max(initial=-1)) + 1), dtype=np.bool_)
    for worker, group in enumerate(groups_W):
        held_EG[:, group] |= holds_EW[:, worker]
    return held_EG


def _make_way(rank_E: Ints, room_W: Ints, holds_EW: Bools, scores_EW: Floats) -> None:
    """Places what is left: where only holders of an expert have room, another one moves there."""
    for expert in np.flatnonzero(holds_EW.sum(axis=1) < rank_E):
        roomy_W = room_W > 0
        if not roomy_W.any():
            return
        # [others, from, to]: who could move from a worker without the expert to one with room.
        from_EW = holds_EW & ~holds_EW[expert] & (scores_EW[expert] > -np.inf)
        to_EW = ~holds_EW & roomy_W & (scores_EW > -np.inf)
        can_move = from_EW[:, :, None] & to_EW[:, None, :]
        if not can_move.any():
            continue
        other, source, goal = np.unravel_index(int(can_move.argmax()), can_move.shape)
        holds_EW[other, source] = False
        holds_EW[other, goal] = True
        holds_EW[expert, source] = True
        room_W[goal] -= 1
