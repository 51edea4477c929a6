"""Which rows go to which expert worker. T tokens, K top-k, E experts, N (token, expert) pairs.

Runs on the host in NumPy: no loop over tokens or experts, one over expert workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class WorkerRows:
    """What one expert worker gets: each token row once, and its experts in CSR form.

    Row i of the message has the experts expert_ids_N[row_offsets[i] : row_offsets[i + 1]].
    """

    worker: int
    row_ids_R: NDArray[np.int64]
    """Rows of the batch, ascending."""
    row_offsets: NDArray[np.uint32]
    """[R + 1]."""
    expert_ids_N: NDArray[np.uint32]
    """Strictly increasing inside a row."""
    slot_ids_N: NDArray[np.int64]
    """Where output n belongs in slot order: t * K + j."""
    num_generated_rows: int
    """Leading rows that belong to generated tokens."""


def plan_dispatch(
    topk_ids_TK: NDArray[np.int32],
    worker_of_expert_E: NDArray[np.int32],
    num_generated_rows: int,
) -> list[WorkerRows]:
    """Split a batch's routing by expert worker; only those with rows, in ascending order.

    Args:
        topk_ids_TK: Chosen experts, different within a row.
        worker_of_expert_E: Expert worker of each expert; >= 0 for all that are chosen.
        num_generated_rows: Leading rows of the batch that belong to generated tokens.
    """
    num_tokens, top_k = topk_ids_TK.shape
    sort_TK = np.argsort(topk_ids_TK, axis=1)
    slots_TK = sort_TK + np.arange(0, num_tokens * top_k, top_k)[:, None]
    experts_TK = np.take_along_axis(topk_ids_TK, sort_TK, axis=1)
    workers_TK = worker_of_expert_E[experts_TK]
    return [
        _rows_of(int(worker), workers_TK == worker, experts_TK, slots_TK, num_generated_rows)
        for worker in np.unique(workers_TK)
    ]


def _rows_of(
    worker: int,
    is_mine_TK: NDArray[np.bool_],
    experts_TK: NDArray[np.int32],
    slots_TK: NDArray[np.int64],
    num_generated_rows: int,
) -> WorkerRows:
    counts_T = np.count_nonzero(is_mine_TK, axis=1)
    row_ids_R = np.flatnonzero(counts_T)
    row_offsets = np.zeros(len(row_ids_R) + 1, np.uint32)
    np.cumsum(counts_T[row_ids_R], out=row_offsets[1:])
    return WorkerRows(
        worker=worker,
        row_ids_R=row_ids_R,
        row_offsets=row_offsets,
        expert_ids_N=experts_TK[is_mine_TK].astype(np.uint32),
        slot_ids_N=slots_TK[is_mine_TK],
        num_generated_rows=int(np.searchsorted(row_ids_R, num_generated_rows)),
    )
