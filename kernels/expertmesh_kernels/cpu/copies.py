"""Which copy of each expert is asked: one rule for every dispatch.

An expert worker reads the weights of each distinct expert that it is asked for, which is most of
its time when tokens are generated; and a layer waits for its slowest expert worker. So first the
busiest expert worker is to have as few distinct experts as can be, then rows are spread, then who
has the shorter queue comes first.

How busy one is with n distinct experts is its cost times n + c, and 0 without any: a call takes as
long as c experts before it computes the first. Among expert workers that cost the same, c changes
nothing; one that is slow is left alone until the others are busier than a call to it takes.

Experts of which there is one copy come first, all others in the order of their rows (Graham's
longest processing time first). What that leaves uneven is moved along cost-reducing paths, after
which no choice makes the busiest expert worker less busy (Harvey, Ladner, Lovasz and Tamir,
"Semi-matchings for bipartite graphs and load balancing", 2003). The same arguments give the same
choice.

E experts, R copies of an expert at most, W expert workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit

UNUSABLE = 0
LEAVING = 2**20
SUSPECT = 2**40
"""Costs of who cannot be asked, and of those that are asked for want of others."""

NUM_EXPERTS, NUM_SOLE = 0, 1
"""Columns of `asked_W2`: distinct experts, and those that cannot well be asked elsewhere."""

_MOST_TIMES = 64
"""As much as the quickest an expert costs elsewhere, at most."""
_MOST_LOOKS, _LOOKS_PER_PAIR = 2**12, 4
"""Pairs of experts looked at to spread rows, more where there are many rows: bounds the time, which
is some ten microseconds when tokens are generated."""
_MOST_ROWS = 256
"""Experts with so many rows or more are taken in the order of their numbers."""


@njit
def set_costs(
    slowness_W: NDArray[np.int64], penalty_W: NDArray[np.int64], cost_W: NDArray[np.int64]
) -> None:
    """What an expert costs on each expert worker, compared with the quickest: a power of two.

    Expert workers that are less than twice as slow cost the same, so that noise moves nothing.

    Args:
        slowness_W: How slow each is, see `call_times`; 0 for those that cannot be asked.
        penalty_W: Factors of the costs.
        cost_W: Takes them.
    """
    least = int(np.int64(2**62))  # a constant would be another type
    for slowness in slowness_W:
        if slowness > 0:
            least = min(least, int(slowness))
    for worker in range(slowness_W.size):
        cost, slowness = int(penalty_W[worker]), slowness_W[worker]
        times = int(np.int64(1))
        while slowness >= 2 * least and times < _MOST_TIMES:
            slowness >>= 1
            times *= 2
        cost_W[worker] = cost * times if slowness > 0 else UNUSABLE


@njit
def choose_copies(
    rows_E: NDArray[np.int64],
    copies_ER: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    call_experts: int,
    queue_W: NDArray[np.int64],
    worker_of_expert_E: NDArray[np.int32],
    asked_W2: NDArray[np.int64],
) -> bool:
    """Chooses an expert worker for each expert with rows; False if one has no copy to ask.

    Args:
        rows_E: Rows of each expert.
        copies_ER: Who holds it, in the order in which they are asked if all else is equal; -1 is
            nobody.
        cost_W: What an expert costs there, relative to others; UNUSABLE, or times LEAVING or
            SUSPECT.
        call_experts: What a call costs before its first expert, in experts; see `call_times`.
        queue_W: How long calls wait there, in any unit.
        worker_of_expert_E: Takes the choice; -1 without rows.
        asked_W2: Takes counts, see above.
    """
    num_workers = cost_W.size
    load_W, rows_W = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    free = np.empty(rows_E.size, np.int64)
    num_free = _take_sole(rows_E, copies_ER, cost_W, worker_of_expert_E, load_W, rows_W, free)
    if num_free < 0:
        return False
    by_rows = _most_rows_first(rows_E, free[:num_free])
    for expert in by_rows:
        best = _least_busy(copies_ER[expert], cost_W, call_experts, queue_W, load_W, rows_W)
        worker_of_expert_E[expert] = best
        load_W[best] += 1
        rows_W[best] += rows_E[expert]
    while _shift(by_rows, copies_ER, cost_W, call_experts, worker_of_expert_E, load_W):
        pass
    looks_left = _MOST_LOOKS + _LOOKS_PER_PAIR * int(rows_E.sum())
    while looks_left > 0:
        looks_left = _spread_rows(
            rows_E,
            by_rows,
            copies_ER,
            cost_W,
            call_experts,
            worker_of_expert_E,
            load_W,
            looks_left,
        )
    _count(copies_ER, cost_W, worker_of_expert_E, asked_W2)
    return True


@njit
def _take_sole(
    rows_E: NDArray[np.int64],
    copies_ER: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    worker_of_expert_E: NDArray[np.int32],
    load_W: NDArray[np.int64],
    rows_W: NDArray[np.int64],
    free: NDArray[np.int64],
) -> int:
    """Experts with one copy go there; how many are left, in `free`. -1 if one has none."""
    num_free = 0
    for expert in range(rows_E.size):
        worker_of_expert_E[expert] = -1
        if rows_E[expert] == 0:
            continue
        num_copies = 0
        for worker in copies_ER[expert]:
            if worker >= 0 and cost_W[worker] != UNUSABLE:
                num_copies += 1
                worker_of_expert_E[expert] = worker
        if num_copies == 0:
            return -1
        if num_copies == 1:
            worker = worker_of_expert_E[expert]
            load_W[worker] += 1
            rows_W[worker] += rows_E[expert]
        else:
            free[num_free] = expert
            num_free += 1
    return num_free


@njit
def _most_rows_first(rows_E: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The experts by rows, then by number."""
    starts = np.zeros(_MOST_ROWS + 1, np.int64)
    for expert in experts:
        starts[_MOST_ROWS - min(rows_E[expert], _MOST_ROWS)] += 1
    at = 0
    for key in range(starts.size):
        count = starts[key]
        starts[key] = at
        at += count
    ordered = np.empty_like(experts)
    for expert in experts:
        key = _MOST_ROWS - min(rows_E[expert], _MOST_ROWS)
        ordered[starts[key]] = expert
        starts[key] += 1
    return ordered


@njit
def _least_busy(
    copies_R: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    call_experts: int,
    queue_W: NDArray[np.int64],
    load_W: NDArray[np.int64],
    rows_W: NDArray[np.int64],
) -> int:
    """Where one more expert costs least."""
    best, best_load, best_rows, best_queue = -1, 0, np.int64(0), np.int64(0)
    for worker in copies_R:
        if worker < 0 or cost_W[worker] == UNUSABLE:
            continue
        load = _busy(load_W[worker] + 1, cost_W[worker], call_experts)
        rows, queue = rows_W[worker], queue_W[worker]
        if (
            best < 0
            or load < best_load
            or (load == best_load and rows < best_rows)
            or (load == best_load and rows == best_rows and queue < best_queue)
        ):
            best, best_load, best_rows, best_queue = int(worker), load, rows, queue
    return best


@njit
def _busy(num: int, cost: int, call_experts: int) -> int:
    """How busy an expert worker is with so many experts, or rows."""
    return (num + call_experts) * cost if num else 0


@njit
def _busiest(num_W: NDArray[np.int64], cost_W: NDArray[np.int64], call_experts: int) -> int:
    """Who has most to do, of those that are asked for more than sole copies."""
    busiest = 0
    for worker in range(1, num_W.size):
        if cost_W[worker] < LEAVING and (
            cost_W[busiest] >= LEAVING
            or _busy(num_W[worker], cost_W[worker], call_experts)
            > _busy(num_W[busiest], cost_W[busiest], call_experts)
        ):
            busiest = worker
    return busiest


@njit
def _shift(
    experts: NDArray[np.int64],
    copies_ER: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    call_experts: int,
    worker_of_expert_E: NDArray[np.int32],
    load_W: NDArray[np.int64],
) -> bool:
    """Takes an expert from the busiest expert worker, along the shortest path; False without one.

    An expert moves to another holder, from there another expert to the next, and so on, to an
    expert worker that is less busy afterwards than the busiest was.
    """
    num_workers = cost_W.size
    busiest = _busiest(load_W, cost_W, call_experts)
    level = _busy(load_W[busiest], cost_W[busiest], call_experts)
    moved_W = np.full(num_workers, -1, np.int64)  # the expert that would move here
    line = np.empty(num_workers, np.int64)
    line[0], head, tail, end = busiest, 0, 1, -1
    while head < tail and end < 0:
        worker = line[head]
        head += 1
        for expert in experts:
            if worker_of_expert_E[expert] != worker or end >= 0:
                continue
            for other in copies_ER[expert]:
                if other < 0 or cost_W[other] == UNUSABLE:
                    continue
                if other == busiest or moved_W[other] >= 0:
                    continue
                moved_W[other] = expert
                line[tail] = other
                tail += 1
                if _busy(load_W[other] + 1, cost_W[other], call_experts) < level:
                    end = int(other)
                    break
    if end < 0:
        return False
    load_W[busiest] -= 1
    load_W[end] += 1
    while end != busiest:
        expert = moved_W[end]
        before = int(worker_of_expert_E[expert])
        worker_of_expert_E[expert] = end
        end = before
    return True


@njit
def _spread_rows(
    rows_E: NDArray[np.int64],
    experts: NDArray[np.int64],
    copies_ER: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    call_experts: int,
    worker_of_expert_E: NDArray[np.int32],
    load_W: NDArray[np.int64],
    looks_left: int,
) -> int:
    """Takes rows from who has the most: one expert moves, or changes places with another.

    The busiest expert worker does not get busier. Returns how many more pairs of experts may be
    looked at; 0 if nothing helps.
    """
    rows_W = np.zeros(cost_W.size, np.int64)
    for expert in range(rows_E.size):
        if worker_of_expert_E[expert] >= 0:
            rows_W[worker_of_expert_E[expert]] += rows_E[expert]
    most, busiest = _busiest(rows_W, cost_W, 0), _busiest(load_W, cost_W, call_experts)
    level = _busy(load_W[busiest], cost_W[busiest], call_experts)
    best_rows, best_expert, best_other, best_back = rows_W[most] * cost_W[most], -1, -1, -1
    for expert in experts:
        if worker_of_expert_E[expert] != most:
            continue
        for other in copies_ER[expert]:
            if other < 0 or other == most or cost_W[other] == UNUSABLE:
                continue
            if _busy(load_W[other] + 1, cost_W[other], call_experts) <= level:
                there = (rows_W[other] + rows_E[expert]) * cost_W[other]
                rows = max(there, (rows_W[most] - rows_E[expert]) * cost_W[most])
                if rows < best_rows:
                    best_rows, best_expert, best_other, best_back = rows, expert, int(other), -1
            for back in experts:
                looks_left -= 1
                if worker_of_expert_E[back] != other or rows_E[back] >= rows_E[expert]:
                    continue
                more = rows_E[expert] - rows_E[back]
                there = (rows_W[other] + more) * cost_W[other]
                rows = max(there, (rows_W[most] - more) * cost_W[most])
                if rows < best_rows and (copies_ER[back] == most).any():
                    best_rows, best_expert, best_other, best_back = rows, expert, int(other), back
    if best_expert < 0:
        return 0
    worker_of_expert_E[best_expert] = best_other
    if best_back >= 0:
        worker_of_expert_E[best_back] = most
    else:
        load_W[best_other] += 1
        load_W[most] -= 1
    return max(looks_left, 0)


@njit
def _count(
    copies_ER: NDArray[np.int32],
    cost_W: NDArray[np.int64],
    worker_of_expert_E: NDArray[np.int32],
    asked_W2: NDArray[np.int64],
) -> None:
    """Counts what each expert worker is asked for."""
    asked_W2[:] = 0
    for expert in range(worker_of_expert_E.size):
        worker = worker_of_expert_E[expert]
        if worker < 0:
            continue
        asked_W2[worker, NUM_EXPERTS] += 1
        is_sole = True
        for other in copies_ER[expert]:
            if other >= 0 and other != worker and UNUSABLE < cost_W[other] < SUSPECT:
                is_sole = False
        asked_W2[worker, NUM_SOLE] += is_sole
