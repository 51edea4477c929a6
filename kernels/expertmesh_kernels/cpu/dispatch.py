"""Routing split by expert worker, and rows moved between tensors and messages.

Rows are moved as bits (uint16 or uint32), and checked for NaN and infinity on the way: an element
is neither if not all bits of its exponent are set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit


@njit
def count_rows(
    topk_ids_TK: NDArray[np.int32],
    worker_of_expert_E: NDArray[np.int32],
    num_generated_rows: int,
    counts_W3: NDArray[np.int64],
) -> None:
    """Rows, pairs and rows of generated tokens of each expert worker, added to zeros."""
    num_tokens, top_k = topk_ids_TK.shape
    last_row_W = np.full(counts_W3.shape[0], -1, np.int64)
    for t in range(num_tokens):
        for j in range(top_k):
            worker = worker_of_expert_E[topk_ids_TK[t, j]]
            if worker < 0:
                continue
            counts_W3[worker, 1] += 1
            if last_row_W[worker] != t:
                last_row_W[worker] = t
                counts_W3[worker, 0] += 1
                counts_W3[worker, 2] += t < num_generated_rows


@njit
def fill_rows(
    topk_ids_TK: NDArray[np.int32],
    worker_of_expert_E: NDArray[np.int32],
    counts_W3: NDArray[np.int64],
    row_ids: NDArray[np.int64],
    row_offsets: NDArray[np.uint32],
    expert_ids: NDArray[np.uint32],
    slot_ids: NDArray[np.int64],
) -> None:
    """The parts of all expert workers one after the other; row_offsets has one more for each.

    Args:
        topk_ids_TK: Chosen experts, different within a row.
        worker_of_expert_E: Expert worker of each expert; those below 0 are left out.
        counts_W3: Of `count_rows`.
        row_ids: [sum of rows].
        row_offsets: [sum of rows + W]; each part begins with 0.
        expert_ids: [sum of pairs], strictly increasing within a row.
        slot_ids: [sum of pairs], t * K + j.
    """
    num_tokens, top_k = topk_ids_TK.shape
    num_workers = counts_W3.shape[0]
    row_at_W = np.zeros(num_workers, np.int64)
    pair_at_W = np.zeros(num_workers, np.int64)
    first_pair_W = np.zeros(num_workers, np.int64)
    last_row_W = np.full(num_workers, -1, np.int64)
    for w in range(1, num_workers):
        row_at_W[w] = row_at_W[w - 1] + counts_W3[w - 1, 0]
        pair_at_W[w] = pair_at_W[w - 1] + counts_W3[w - 1, 1]
        first_pair_W[w] = pair_at_W[w]
    for w in range(num_workers):
        row_offsets[row_at_W[w] + w] = 0
    order = np.empty(top_k, np.int64)
    for t in range(num_tokens):
        ids = topk_ids_TK[t]
        _ascending(ids, order)
        for i in range(top_k):
            expert = ids[order[i]]
            worker = worker_of_expert_E[expert]
            if worker < 0:
                continue
            pair = pair_at_W[worker]
            expert_ids[pair] = expert
            slot_ids[pair] = t * top_k + order[i]
            pair_at_W[worker] = pair + 1
            if last_row_W[worker] != t:
                last_row_W[worker] = t
                row_ids[row_at_W[worker]] = t
                row_at_W[worker] += 1
            row_offsets[row_at_W[worker] + worker] = pair + 1 - first_pair_W[worker]


@njit
def _ascending(ids: NDArray[np.int32], order: NDArray[np.int64]) -> None:
    """Positions of a few ids from the smallest id to the largest."""
    for i in range(ids.size):
        at = i
        while at > 0 and ids[order[at - 1]] > ids[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@njit
def gather_rows(
    source_TH: NDArray[np.unsignedinteger],
    row_ids_R: NDArray[np.int64],
    exponent: int,
    out_RH: NDArray[np.unsignedinteger],
    broken_T: NDArray[np.bool_],
) -> int:
    """out[r] = source[row_ids[r]]; zeros for a row that is not finite, which is marked.

    Returns how many rows were not.
    """
    num_broken = 0
    for r in range(row_ids_R.size):
        t = row_ids_R[r]
        if not _copy_finite(source_TH[t], out_RH[r], exponent):
            out_RH[r, :] = 0
            broken_T[t] = True
            num_broken += 1
    return num_broken


@njit
def scatter_rows(
    source_NH: NDArray[np.unsignedinteger],
    slot_ids_N: NDArray[np.int64],
    exponent: int,
    out_SH: NDArray[np.unsignedinteger],
) -> bool:
    """out[slot_ids[n]] = source[n]; False if an element is not finite."""
    for n in range(slot_ids_N.size):
        if not _copy_finite(source_NH[n], out_SH[slot_ids_N[n]], exponent):
            return False
    return True


@njit
def unpack_pairs(
    num_rows: int,
    row_offsets: NDArray[np.uint32],
    expert_ids_N: NDArray[np.uint32],
    num_experts: int,
    top_k: int,
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
) -> bool:
    """Check the routing of a call of R rows and N pairs, and copy it for kernels.

    Args:
        num_rows: R.
        row_offsets: [R + 1].
        expert_ids_N: Experts of the pairs.
        num_experts: Experts of the layer.
        top_k: Most experts of a row.
        row_of_pair_N: Takes the row of each pair.
        expert_of_pair_N: Takes its expert.

    Returns False for offsets that do not begin with 0, rise and end with N, ids that are too large
    or do not rise within a row, and a row with too many.
    """
    num_pairs = expert_ids_N.size
    if row_offsets.size != num_rows + 1 or row_offsets[0] != 0:
        return False
    if row_offsets[num_rows] != num_pairs:
        return False
    for r in range(num_rows):
        first, end = np.int64(row_offsets[r]), np.int64(row_offsets[r + 1])
        if end <= first or end - first > top_k or end > num_pairs:
            return False
        last = np.int64(-1)
        for n in range(first, end):
            expert = np.int64(expert_ids_N[n])
            if expert <= last or expert >= num_experts:
                return False
            last = expert
            row_of_pair_N[n] = r
            expert_of_pair_N[n] = expert
    return True


@njit
def copy_rows(
    rows_RH: NDArray[np.unsignedinteger], exponent: int, out_RH: NDArray[np.unsignedinteger]
) -> bool:
    """out = rows; False if an element is not finite."""
    num_broken = 0
    for r in range(rows_RH.shape[0]):
        num_broken += not _copy_finite(rows_RH[r], out_RH[r], exponent)
    return num_broken == 0


@njit
def unpack_call(
    rows_RH: NDArray[np.unsignedinteger],
    row_offsets: NDArray[np.uint32],
    expert_ids_N: NDArray[np.uint32],
    num_experts: int,
    top_k: int,
    exponent: int,
    out_RH: NDArray[np.unsignedinteger],
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
) -> bool:
    """`unpack_pairs` and `copy_rows` in one."""
    is_right = unpack_pairs(
        rows_RH.shape[0], row_offsets, expert_ids_N, num_experts, top_k,
        row_of_pair_N, expert_of_pair_N,
    )  # fmt: skip
    return is_right and copy_rows(rows_RH, exponent, out_RH)


@njit
def _copy_finite(
    source: NDArray[np.unsignedinteger], target: NDArray[np.unsignedinteger], exponent: int
) -> bool:
    """target = source; False if an element is NaN or infinite. Without a branch inside the loop."""
    mask = target.dtype.type(exponent)
    most = target.dtype.type(0)
    for h in range(source.size):
        bits = source[h]
        target[h] = bits
        most = max(most, bits & mask)
    return bool(most != mask)
