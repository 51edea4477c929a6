"""Paged attention. One chain per score and per output element, so neighbours cannot change a bit.

Scores are products of query rows with panels of 64 keys, and the weighted sum is a product of
probabilities with panels of 64 value columns. Both run on the register tile of the linear layers,
in FP32. With keys j ascending from the first one visible to the row's position:

    score[j] = scale * (chain over d of fma(q[d], k[j, d], acc))
    score[j] = cap * tanh(score[j] / cap)                      with a softcap
    p[j]     = exp(score[j] - max)                             max over scores, and the head's sink
    out[d]   = (chain over j of fma(p[j], v[j, d], acc)) / sum
    sum      = sum of p in the order of `lane_sum`             + exp(sink - max) with a sink

Adjacent rows of one sequence (a prefill chunk) share the loads of keys and values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.pages import Pages, load_keys, load_values
from expertmesh_kernels.cpu.primitives import exp, narrow_like, tanh
from expertmesh_kernels.cpu.storage import lane_max, lane_sum, widen_block
from expertmesh_kernels.cpu.tile import MAX_ROWS, PANEL, run_tile

MAX_QUERIES = 24
"""Query vectors (rows x heads of one group) that share loads; bounds the scratch."""
MAX_LATENT_QUERIES = 96
"""More where values must be transposed."""


@njit
def paged_attention(
    q: NDArray[np.generic],
    q_stride: int,
    pool: NDArray[np.generic],
    pages: Pages,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    scale: np.float32,
    window: int,
    softcap: np.float32,
    sinks_n: NDArray[np.float32],
    out_TnD: NDArray[np.generic],
) -> None:
    """Attention of every row over its sequence's keys up to its own position.

    Args:
        q: Flat queries; row t starts at t * q_stride.
        q_stride: Distance of two rows.
        pool: Flat.
        pages: Where the layer's keys and values are.
        block_tables_SB: Blocks of each sequence in order.
        sequence_of_row_T: Row of `block_tables_SB`.
        positions_T: Position of each row; its own key is already written.
        scale: Factor of the scores.
        window: Keys visible to a row, itself included.
        softcap: Bound of the scores, or 0.
        sinks_n: One logit per head, or empty.
        out_TnD: Output, any stored type; D is the dimension of values.
    """
    num_rows, num_heads, value_dim = out_TnD.shape
    key_dim = pages.key_dim
    group = num_heads // pages.num_heads
    max_queries = MAX_LATENT_QUERIES if pages.value_dim == 0 else MAX_QUERIES
    max_rows = max(1, max_queries // group)
    room = _scratch_keys(positions_T, window, max_rows)
    num_panels = -(-value_dim // PANEL)
    wide_q = np.empty(max_rows * group * key_dim, np.float32)
    scores = np.empty(max_rows * group * room, np.float32)
    sums = np.empty(max_rows * group, np.float32)
    panel = np.zeros(max(key_dim, num_panels * PANEL) * PANEL, np.float32)
    acc = np.empty(max(max_rows * group * num_panels, MAX_ROWS) * PANEL, np.float32)
    t = 0
    while t < num_rows:
        rows = _run_length(sequence_of_row_T, positions_T, t, max_rows)
        table = block_tables_SB[sequence_of_row_T[t]]
        first = int(positions_T[t])
        end = first + rows
        origin = _first_panel(first, window)
        num_queries = rows * group
        for kv_head in range(pages.num_heads):
            head = kv_head * group
            for r in range(rows):
                q_at = (t + r) * q_stride + head * key_dim
                widen_block(q, q_at, 0, 1, group * key_dim, wide_q, r * group * key_dim, 0)
            for begin in range(origin, end, PANEL):
                load_keys(pool, pages, kv_head, table, begin, min(begin + PANEL, end), panel)
                at = begin - origin
                _score_panel(wide_q, num_queries, key_dim, panel, scale, acc, scores, at, room)
            sinks = sinks_n[head : head + group]  # of no sinks: empty
            _softmax(scores, room, sums[:num_queries], first, rows, window, softcap, sinks)
            acc[: num_panels * num_queries * PANEL] = np.float32(0.0)
            for begin in range(origin, end, PANEL):
                stop = min(begin + PANEL, end)
                load_values(pool, pages, kv_head, table, begin, stop, value_dim, panel)
                _weigh_panel(
                    scores, room, origin, begin, stop, first, rows, group, window,
                    num_panels, panel, acc,
                )  # fmt: skip
            _store(acc, sums, rows, group, out_TnD, t, head)
        t += rows


@njit
def _run_length(
    sequence_of_row_T: NDArray[np.int32], positions_T: NDArray[np.int32], t: int, max_rows: int
) -> int:
    """How many rows from t on are successive positions of one sequence, at most `max_rows`."""
    rows = 1
    while (
        rows < max_rows
        and t + rows < positions_T.size
        and sequence_of_row_T[t + rows] == sequence_of_row_T[t]
        and positions_T[t + rows] == positions_T[t] + rows
    ):
        rows += 1
    return rows


@njit
def _scratch_keys(positions_T: NDArray[np.int32], window: int, max_rows: int) -> int:
    """Keys of the longest visible range of a run, in whole panels plus one for alignment."""
    longest = 0
    for t in range(positions_T.size):
        longest = max(longest, int(positions_T[t]) + 1)
    longest = min(longest, int(window) + max_rows)
    return (-(-longest // PANEL) + 1) * PANEL


@njit
def _first_panel(first: int, window: int) -> int:
    """Key at which the panels of a run of rows start: a multiple of the panel size."""
    return max(first + 1 - window, 0) // PANEL * PANEL


@njit
def _score_panel(
    wide_q: NDArray[np.float32],
    num_queries: int,
    key_dim: int,
    panel: NDArray[np.float32],
    scale: np.float32,
    acc: NDArray[np.float32],
    scores: NDArray[np.float32],
    first_score: int,
    room: int,
) -> None:
    """scores[m * room + first_score + c] for 64 keys, some perhaps not for row m to see."""
    for m in range(0, num_queries, MAX_ROWS):
        tile = min(MAX_ROWS, num_queries - m)
        acc[: tile * PANEL] = np.float32(0.0)
        run_tile(tile, wide_q, m * key_dim, key_dim, panel, 0, key_dim, acc, 0)
        for r in range(tile):
            at = (m + r) * room + first_score
            target = scores[at : at + PANEL]
            source = acc[r * PANEL : (r + 1) * PANEL]
            for c in range(PANEL):
                target[c] = source[c] * scale


@njit
def _softmax(
    scores: NDArray[np.float32],
    room: int,
    sums: NDArray[np.float32],
    first: int,
    rows: int,
    window: int,
    softcap: np.float32,
    sinks: NDArray[np.float32],
) -> None:
    """Replace each visible score by exp(score - max), and keep the sums.

    `sinks` are those of one group, or empty.
    """
    origin = _first_panel(first, window)
    group = sums.size // rows
    for m in range(sums.size):
        end = first + m // group + 1
        start = max(end - window, 0)
        visible = scores[m * room + start - origin : m * room + end - origin]
        if softcap > 0:
            _cap(visible, softcap)
        top = lane_max(visible)
        sink = sinks[m % group] if sinks.size > 0 else np.float32(-np.inf)
        top = sink if sink > top else top
        for j in range(visible.size):
            visible[j] = exp(visible[j] - top)
        sums[m] = lane_sum(visible) + exp(sink - top)


@njit
def _cap(values: NDArray[np.float32], cap: np.float32) -> None:
    for j in range(values.size):
        values[j] = cap * tanh(values[j] / cap)


@njit
def _weigh_panel(
    scores: NDArray[np.float32],
    room: int,
    origin: int,
    begin: int,
    stop: int,
    first: int,
    rows: int,
    group: int,
    window: int,
    num_panels: int,
    panel: NDArray[np.float32],
    acc: NDArray[np.float32],
) -> None:
    """Extend the chains acc[column panel, m, c] by the keys begin .. stop that each row sees."""
    num_queries = rows * group
    # The last row starts latest and the first row ends first.
    is_shared = begin >= max(first + rows - window, 0) and stop <= first + 1
    runs = 1 if is_shared else rows
    per_run = num_queries // runs
    for run in range(runs):
        low = begin if is_shared else max(begin, first + run + 1 - window)
        high = stop if is_shared else min(stop, first + run + 1)
        for p in range(num_panels if high > low else 0):
            for m in range(run * per_run, (run + 1) * per_run, MAX_ROWS):
                run_tile(
                    min(MAX_ROWS, (run + 1) * per_run - m),
                    scores, m * room + low - origin, room,
                    panel, (p * PANEL + low - begin) * PANEL, high - low,
                    acc, (p * num_queries + m) * PANEL,
                )  # fmt: skip


@njit
def _store(
    acc: NDArray[np.float32],
    sums: NDArray[np.float32],
    rows: int,
    group: int,
    out_TnD: NDArray[np.generic],
    t: int,
    head: int,
) -> None:
    """out = acc / sum, rounded once."""
    value_dim = out_TnD.shape[2]
    for m in range(rows * group):
        target = out_TnD[t + m // group, head + m % group]
        total = sums[m]
        for column in range(0, value_dim, PANEL):
            at = (column // PANEL * rows * group + m) * PANEL
            for c in range(min(PANEL, value_dim - column)):
                target[column + c] = narrow_like(acc[at + c] / total, out_TnD)
