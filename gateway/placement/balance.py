"""How evenly load falls on workers, and moves that make it more even.

The load of an expert is shared by its copies as evenly for all workers as can be, which is what the
choice among copies in each dispatch comes to over time.

Shapes: L MoE layers, E experts, W workers.
"""

from __future__ import annotations

import numpy as np

from gateway.placement.arrays import Bools, Floats, Ints

_ROUNDS = 24
_TINY = 1e-12
_PASSES = 3
"""After each, load is shared anew by the copies."""
_STEPS_PER_WORKER = 4
_PARTNERS = 4
"""Of the busiest worker in a step: those with the least load."""
_LEAST_GAIN = 1e-3
"""Share of the busiest worker's load that a step has to take from it."""


def shared_load(load_LE: Floats, holds_LEW: Bools) -> Floats:
    """[L, E, W] the load of each copy; that of an expert without a copy is left out."""
    part_LEW: Floats = holds_LEW / np.maximum(holds_LEW.sum(axis=2, keepdims=True), 1)
    if (holds_LEW.sum(axis=2) <= 1).all():
        return np.multiply(part_LEW, load_LE[:, :, None])
    for _ in range(_ROUNDS):
        # Copies on busy workers give some of their part to those on others.
        sum_LW = np.einsum("le,lew->lw", load_LE, part_LEW)
        mean_L1 = sum_LW.mean(axis=1, keepdims=True)
        pull_LW = np.sqrt((mean_L1 + _TINY) / (sum_LW + 0.05 * mean_L1 + _TINY))
        part_LEW = part_LEW * pull_LW[:, None, :]
        part_LEW /= np.maximum(part_LEW.sum(axis=2, keepdims=True), _TINY)
    return np.multiply(part_LEW, load_LE[:, :, None])


def slowest_L(load_LE: Floats, holds_LEW: Bools) -> Floats:
    """[L] load of the busiest worker of each layer."""
    busiest_L: Floats = shared_load(load_LE, holds_LEW).sum(axis=1).max(axis=1, initial=0.0)
    return busiest_L


def imbalance(load_LE: Floats, slowest_of_L: Floats, num_workers: int) -> float:
    """Time of the slowest workers to that of even load, over all layers; 1 is perfect."""
    mean = load_LE.sum() / max(num_workers, 1)
    return float(slowest_of_L.sum() / mean) if mean > 0 else 1.0


def even_out(
    load_E: Floats, holds_EW: Bools, nodes_W: Ints, room_W: Ints, good_enough: float
) -> Bools:
    """[E, W] one layer with less load on its busiest worker, by as few moves as will do.

    Each step moves a copy from the busiest worker to another one with room, or exchanges it for a
    lighter one there.

    Args:
        load_E: Of each expert.
        holds_EW: Who holds what.
        nodes_W: The node of each worker; copies do not come together on one.
        room_W: How many more experts fit on each worker.
        good_enough: Load of the busiest worker to stop at.
    """
    holds_EW, room_W = holds_EW.copy(), room_W.copy()
    for _ in range(_PASSES):
        copy_EW = shared_load(load_E[None], holds_EW[None])[0]
        if copy_EW.sum(axis=0).max() <= good_enough:
            break
        for _ in range(_STEPS_PER_WORKER * len(nodes_W)):
            sum_W = copy_EW.sum(axis=0)
            if sum_W.max() <= good_enough or not _step(copy_EW, holds_EW, nodes_W, room_W):
                break
    return holds_EW


def _step(copy_EW: Floats, holds_EW: Bools, nodes_W: Ints, room_W: Ints) -> bool:
    """The move or exchange after which the busier of its two workers has least; False if none."""
    sum_W = copy_EW.sum(axis=0)
    busiest = int(sum_W.argmax())
    best, best_gain = None, _LEAST_GAIN * float(sum_W[busiest])
    for other in np.argsort(sum_W, kind="stable")[:_PARTNERS].tolist():
        gap = float(sum_W[busiest] - sum_W[other])
        if gap <= best_gain:
            break
        found = _best_exchange(copy_EW, holds_EW, nodes_W, busiest, other, bool(room_W[other] > 0))
        if found is None:
            continue
        given, taken, delta = found
        gain = min(delta, gap - delta)
        if gain > best_gain:
            best, best_gain = (given, taken, other), gain
    if best is None:
        return False
    given, taken, other = best
    _move(copy_EW, holds_EW, room_W, given, busiest, other)
    if taken >= 0:
        _move(copy_EW, holds_EW, room_W, taken, other, busiest)
    return True


def _best_exchange(
    copy_EW: Floats, holds_EW: Bools, nodes_W: Ints, busiest: int, other: int, has_room: bool
) -> tuple[int, int, float] | None:
    """Expert to give, expert to take or -1, and the load that moves: nearest to half the gap."""
    gives = np.flatnonzero(_movable(holds_EW, nodes_W, busiest, other))
    takes = np.flatnonzero(_movable(holds_EW, nodes_W, other, busiest))
    back = copy_EW[takes, other]
    if has_room:
        takes, back = np.append(takes, -1), np.append(back, 0.0)
    if not len(gives) or not len(takes):
        return None
    delta = copy_EW[gives, busiest][:, None] - back
    half = (copy_EW[:, busiest].sum() - copy_EW[:, other].sum()) / 2
    index = int(np.abs(delta - half).argmin())
    give, take = np.unravel_index(index, delta.shape)
    return int(gives[give]), int(takes[take]), float(delta[give, take])


def _movable(holds_EW: Bools, nodes_W: Ints, source: int, goal: int) -> Bools:
    """[E] experts at `source` that may go to `goal`: no copy there, nor elsewhere on its node."""
    same_node = nodes_W == nodes_W[goal]
    same_node[source] = False
    at_node_E = holds_EW[:, same_node].any(axis=1)
    return holds_EW[:, source] & ~holds_EW[:, goal] & ~at_node_E


def _move(
    copy_EW: Floats, holds_EW: Bools, room_W: Ints, expert: int, source: int, goal: int
) -> None:
    """Moves a copy with its load, as it is shared now."""
    copy_EW[expert, goal] = copy_EW[expert, source]
    copy_EW[expert, source] = 0.0
    holds_EW[expert, source] = False
    holds_EW[expert, goal] = True
    room_W[source] += 1
    room_W[goal] -= 1
