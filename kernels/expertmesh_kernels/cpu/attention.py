"""Paged attention, shared out among the team.

A row's keys are taken in parts of 512 by their position in the sequence, and within a part all at
once. With keys j of a part ascending from the first one visible to the row's position:

    score[j] = scale * (q . k[j])
    score[j] = cap * tanh(score[j] / cap)                      with a softcap
    top      = max over the part's scores
    p[j]     = exp(score[j] - top)
    sum      = sum of p in the order of `lane_sum`
    out[d]   = sum over j of p[j] v[j, d]

Parts are merged in ascending order, then the head's sink if there is one:

    top'     = max(top, top of the part)
    sum'     = sum * exp(top - top') + sum of the part * exp(top of the part - top'); likewise out

and the result is out / sum. Parts belong to positions, so a row's bits depend neither on its
neighbours nor on who computes which part. Products and p: see `expertmesh_kernels.cpu.scores`.

Adjacent rows of one sequence (a prefill chunk) make a run and share the loads of keys and values.
A chunk of work is one run and one key head; where that makes few chunks, a part of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.block import (
    begin_rows,
    block_rows,
    end_rows,
    gather_row,
    packed_depth,
    panel_size,
    scratch_rows,
)
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at
from expertmesh_kernels.cpu.pages import Pages, pages_of, pool_of, prefetch_part
from expertmesh_kernels.cpu.panels import load_keys
from expertmesh_kernels.cpu.partial import Partial, ceil_panels, clear, keep, merge, new_partial
from expertmesh_kernels.cpu.primitives import exp
from expertmesh_kernels.cpu.scores import (
    PART,
    Span,
    run_queries,
    score_panels,
    to_weights,
    weigh_part,
)
from expertmesh_kernels.cpu.scratch import scratch_floats, scratch_like
from expertmesh_kernels.cpu.storage import narrow_into
from expertmesh_kernels.cpu.team import parallel_for
from expertmesh_kernels.cpu.tile import PANEL

Arrays = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]
"""Queries, pool, output, form."""
Where = tuple[
    NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.float32]
]
"""Block tables, sequences and positions of rows, starts of runs, sinks."""

_SPLIT_BELOW = 16
"""So few chunks keep no team busy evenly: they are split into parts."""
_FEW_KEY_BYTES, _MANY_KEY_BYTES = 16 * 1024, 64 * 1024


class Scores(NamedTuple):
    """What is done with scores."""

    scale: np.float32
    window: int
    """Keys visible to a row, itself included."""
    softcap: np.float32
    """Bound, or 0."""


class Shape(NamedTuple):
    """Of queries and of the work."""

    q_stride: int
    num_heads: int
    value_dim: int
    num_parts: int
    """Most parts of a run."""
    is_split: bool
    """A chunk is one part."""


@njit
def paged_attention(
    q_address: int,
    q_stride: int,
    out_address: int,
    like: NDArray[np.generic],
    form: NDArray[np.generic],
    layer: NDArray[np.integer],
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    num_heads: int,
    value_dim: int,
    scale: np.float32,
    window: int,
    softcap: np.float32,
    sinks_n: NDArray[np.float32],
) -> None:
    """Attention of every row over its sequence's keys up to its own position.

    Args:
        q_address: Of the queries; row t starts t * q_stride elements later.
        q_stride: Distance of two rows.
        out_address: Of the output, contiguous [T, num_heads, value_dim].
        like: An empty array of the stored type of queries, pages and output.
        form: An empty array of the type of panels: float32, or uint32 for AMX.
        layer: Where the layer's keys and values are: the fields of `Pages`.
        block_tables_SB: Blocks of each sequence in order.
        sequence_of_row_T: Row of `block_tables_SB`.
        positions_T: Position of each row; its own key is already written.
        num_heads: Query heads.
        value_dim: Dimensions of values.
        scale: Factor of the scores.
        window: Keys visible to a row, itself included.
        softcap: Bound of the scores, or 0.
        sinks_n: One logit per head, or empty.
    """
    pages = pages_of(layer)
    num_rows = positions_T.size
    span = (num_rows - 1) * q_stride + num_heads * pages.key_dim if num_rows > 0 else 0
    attend(
        array_at(q_address, span, like), q_stride,
        array_at(out_address, num_rows * num_heads * value_dim, like), form, pages,
        block_tables_SB, sequence_of_row_T, positions_T, num_heads, value_dim,
        Scores(scale, window, softcap), sinks_n,
    )  # fmt: skip


@njit
def attend(
    q: NDArray[np.generic],
    q_stride: int,
    out: NDArray[np.generic],
    form: NDArray[np.generic],
    pages: Pages,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    num_heads: int,
    value_dim: int,
    scores: Scores,
    sinks_n: NDArray[np.float32],
) -> None:
    """`paged_attention` of flat arrays."""
    group = num_heads // pages.num_heads
    arrays = (q, pool_of(pages, q), out, form)
    max_rows = max(1, run_queries(form, pages.value_dim == 0) // group)
    starts, num_runs, num_parts = _find_runs(
        sequence_of_row_T, positions_T, max_rows, scores.window
    )
    num_chunks = num_runs * pages.num_heads
    is_split = num_parts > 1 and num_chunks < _SPLIT_BELOW
    shape = Shape(q_stride, num_heads, value_dim, num_parts, is_split)
    size = max_rows * group
    partials = new_partial(num_chunks * num_parts if is_split else 0, size, value_dim)
    where = (block_tables_SB, sequence_of_row_T, positions_T, starts, sinks_n)
    arguments = (arrays, pages, where, scores, shape, size, partials)
    parallel_for(_attend, arguments, num_chunks * num_parts if is_split else num_chunks)
    if is_split:
        parallel_for(_finish, arguments, num_chunks)


@njit
def _find_runs(
    sequence_of_row_T: NDArray[np.int32], positions_T: NDArray[np.int32], max_rows: int, window: int
) -> tuple[NDArray[np.int64], int, int]:
    """Where runs of successive positions of one sequence start, and the end of the last one.

    Also their number, and the most parts that one of them sees.
    """
    starts = np.empty(positions_T.size + 1, np.int64)
    count, num_parts = 0, 1
    for t in range(positions_T.size):
        first = starts[count - 1] if count > 0 else 0
        is_next = (
            count > 0
            and t - first < max_rows
            and sequence_of_row_T[t] == sequence_of_row_T[first]
            and positions_T[t] == positions_T[first] + (t - first)
        )
        if not is_next:
            starts[count] = t
            count += 1
            first = t
        low = max(positions_T[first] + 1 - window, 0) // PART
        num_parts = max(num_parts, positions_T[t] // PART - low + 1)
    starts[count] = positions_T.size
    return starts, count, num_parts


@njit
def _attend(
    arrays: Arrays,
    pages: Pages,
    where: Where,
    scores: Scores,
    shape: Shape,
    size: int,
    partials: Partial,
    chunk: int,
) -> None:
    """One run with one key head: all of its parts, or one."""
    q, pool, _out, form = arrays
    tables_SB, sequence_of_row_T, positions_T, starts, _sinks_n = where
    task = chunk // shape.num_parts if shape.is_split else chunk
    run, head = task // pages.num_heads, task % pages.num_heads
    t, rows = starts[run], starts[run + 1] - starts[run]
    group = shape.num_heads // pages.num_heads
    num_queries = rows * group
    first = int(positions_T[t])
    end = first + rows
    low = max(first + 1 - scores.window, 0)
    first_part, end_part = low // PART, (end - 1) // PART + 1
    if shape.is_split:
        first_part += chunk % shape.num_parts
        end_part = min(end_part, first_part + 1)
    if first_part >= end_part:
        return
    depth = packed_depth(form, pages.key_dim)
    queries = scratch_rows(form, num_queries * depth)
    for m in range(num_queries):
        at = (t + m // group) * shape.q_stride + (head * group + m % group) * pages.key_dim
        gather_row(q[at : at + pages.key_dim], queries[m * depth : (m + 1) * depth])
    room = min(PART, -(-end // PANEL) * PANEL - low // PANEL * PANEL)
    panel_len = panel_size(form, depth)
    at_once = _panels_at_once(num_queries, panel_len * form.itemsize)
    keys = scratch_like(at_once * panel_len, form)
    for i in range(keys.size if depth > pages.key_dim else 0):
        keys[i] = 0
    raw = scratch_floats(num_queries * room)
    weights = scratch_rows(form, num_queries * room)
    acc_size = ceil_panels(shape.value_dim) * num_queries * PANEL
    total = Partial(
        scratch_floats(acc_size), scratch_floats(num_queries), scratch_floats(num_queries)
    )
    part = Partial(
        scratch_floats(acc_size), scratch_floats(num_queries), scratch_floats(num_queries)
    )
    if not shape.is_split:
        clear(total)
    table = tables_SB[sequence_of_row_T[t]]
    begin_rows(form, min(num_queries, block_rows(form)))
    for p in range(first_part, end_part):
        begin = max(p * PART, low // PANEL * PANEL)
        stop = min(p * PART + PART, end)
        span = Span(first, group, begin, stop, scores.window)
        prefetch_part(pool, pages, head, table, begin, stop)
        for at in range(begin, stop, at_once * PANEL):
            num_panels = min(at_once, -(-(stop - at) // PANEL))
            for panel in range(num_panels):
                key = at + panel * PANEL
                target = keys[panel * panel_len : (panel + 1) * panel_len]
                load_keys(pool, pages, head, table, key, min(key + PANEL, stop), target)
            score_panels(
                queries, num_queries, depth, keys, num_panels, scores.scale, raw, room, at - begin
            )
        to_weights(raw, weights, room, part.tops_M, part.sums_M, span, scores.softcap)
        weigh_part(
            weights, num_queries, room, form, pool, pages, head, table, span, shape.value_dim,
            part.acc,
        )  # fmt: skip
        if shape.is_split:
            keep(part, partials, chunk, size, num_queries)
        else:
            merge(total, part.acc, part.tops_M, part.sums_M)
    end_rows(form)
    if not shape.is_split:
        _store(total, arrays, where, shape, t, head, group)


@njit
def _panels_at_once(num_queries: int, panel_bytes: int) -> int:
    """Of keys, made ready before they are multiplied: in L1, or in L2 for several row blocks."""
    budget = _FEW_KEY_BYTES if num_queries <= 32 else _MANY_KEY_BYTES
    return max(1, min(PART // PANEL, budget // panel_bytes))


@njit
def _finish(
    arrays: Arrays,
    pages: Pages,
    where: Where,
    scores: Scores,
    shape: Shape,
    size: int,
    partials: Partial,
    task: int,
) -> None:
    """Merge the parts of one run with one key head, and store the result."""
    _tables_SB, _sequence_of_row_T, positions_T, starts, _sinks_n = where
    run, head = task // pages.num_heads, task % pages.num_heads
    t, rows = starts[run], starts[run + 1] - starts[run]
    group = shape.num_heads // pages.num_heads
    first = int(positions_T[t])
    low = max(first + 1 - scores.window, 0)
    num_queries = rows * group
    total = Partial(
        scratch_floats(ceil_panels(shape.value_dim) * num_queries * PANEL),
        scratch_floats(num_queries), scratch_floats(num_queries),
    )  # fmt: skip
    clear(total)
    room = partials.acc.size // partials.tops_M.size * size
    for p in range((first + rows - 1) // PART + 1 - low // PART):
        place = task * shape.num_parts + p
        merge(
            total,
            partials.acc[place * room : place * room + total.acc.size],
            partials.tops_M[place * size : place * size + num_queries],
            partials.sums_M[place * size : place * size + num_queries],
        )
    _store(total, arrays, where, shape, t, head, group)


@njit
def _store(
    total: Partial, arrays: Arrays, where: Where, shape: Shape, t: int, head: int, group: int
) -> None:
    """out = acc / sum with the sink in it, rounded once."""
    out, sinks_n, value_dim = arrays[2], where[4], shape.value_dim
    num_queries = total.tops_M.size
    for m in range(num_queries):
        own_head = head * group + m % group
        factor, divisor = np.float32(1.0), total.sums_M[m]
        if sinks_n.size > 0:
            top, sink = total.tops_M[m], sinks_n[own_head]
            highest = sink if sink > top else top
            factor = exp(top - highest)
            divisor = total.sums_M[m] * factor + exp(sink - highest)
        row = ((t + m // group) * shape.num_heads + own_head) * value_dim
        for column in range(0, value_dim, PANEL):
            at = (column // PANEL * num_queries + m) * PANEL
            count = min(PANEL, value_dim - column)
            values = total.acc[at : at + count]
            for c in range(count):
                values[c] = values[c] * factor / divisor
            narrow_into(total.acc, at, count, out, row + column)
