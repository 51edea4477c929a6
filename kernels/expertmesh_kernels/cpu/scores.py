"""What attention does with one part of the keys: scores, weights, weighted sums. M query vectors.

FP32 chains: a score is a chain over dimensions, a weighted sum a chain over the keys that the row
sees. AMX (bfloat16): sums of TDPBF16PS; weights are rounded to bfloat16, as the values they
multiply are, and their sum is that of the rounded ones. Keys that a row does not see have weight 0
there; so steps of 32 keys start at multiples of 64, whatever a row or its window starts with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.block import begin_rows, block_rows, multiply, panel_size
from expertmesh_kernels.cpu.jit import chosen_by_types, njit
from expertmesh_kernels.cpu.pages import Pages
from expertmesh_kernels.cpu.panels import load_values
from expertmesh_kernels.cpu.primitives import exp, float_bits, tanh
from expertmesh_kernels.cpu.scratch import scratch_floats, scratch_like
from expertmesh_kernels.cpu.softmax import soften
from expertmesh_kernels.cpu.storage import lane_max, lane_sum
from expertmesh_kernels.cpu.tile import MAX_ROWS, PANEL, run_tile, scale_rows

PART = 512
"""Keys of a part."""
_CHAIN_QUERIES = 24
"""Query vectors of a run that share loads; bounds the scratch."""

_MANY_QUERIES = 96
"""More where loading costs more than a copy: transposed, or in pairs."""


class Span(NamedTuple):
    """A run's rows and the keys of a part."""

    first: int
    """Position of the first row."""
    group: int
    """Query vectors of a row."""
    begin: int
    """Where panels start, a multiple of 64; what the run sees may start later."""
    stop: int
    window: int


@njit
def visible_keys(span: Span, row: int) -> tuple[int, int]:
    """First and end of the part's keys that a row sees; none if the first is not before the end."""
    end = span.first + row + 1
    return max(end - span.window, span.begin), min(end, span.stop)


@njit
def score_panels(
    queries: NDArray[np.generic],
    num_queries: int,
    depth: int,
    keys: NDArray[np.generic],
    num_panels: int,
    scale: np.float32,
    raw: NDArray[np.float32],
    room: int,
    column: int,
) -> None:
    """raw[m * room + column + c] for 64 keys a panel, some perhaps not for query m to see."""
    most = block_rows(keys)
    acc = scratch_floats(min(most, num_queries) * PANEL)
    for m in range(0, num_queries, most):
        rows = min(most, num_queries - m)
        if num_queries > most:  # else the only block is begun already
            begin_rows(keys, rows)
        for panel in range(num_panels):
            multiply(queries, m * depth, depth, rows, keys, panel, depth, None, acc)
            scale_rows(acc, rows, scale, raw, m * room + column + panel * PANEL, room)


@njit
def to_weights(
    raw: NDArray[np.float32],
    weights: NDArray[np.generic],
    room: int,
    tops_M: NDArray[np.float32],
    sums_M: NDArray[np.float32],
    span: Span,
    softcap: np.float32,
) -> None:
    """Weights exp(score - top) of the keys that each query sees; raw is used up.

    A query that sees none of the part has the sum 0.
    """
    for m in range(tops_M.size):
        low, high = visible_keys(span, m // span.group)
        low, high = low - span.begin, max(low, high) - span.begin
        if softcap > 0:
            visible = raw[m * room + low : m * room + high]
            for j in range(visible.size):
                visible[j] = softcap * tanh(visible[j] / softcap)
        count = span.stop - span.begin
        tops_M[m], sums_M[m] = put_weights(raw, m * room, low, high, count, weights)


# Stand-ins: what they do is chosen from the types of their arguments when a kernel is compiled.


def run_queries(form: NDArray[np.generic], is_latent: bool) -> int:
    """Most query vectors of a run."""
    raise NotImplementedError


def put_weights(
    raw: NDArray[np.float32], at: int, low: int, high: int, count: int, weights: NDArray[np.generic]
) -> tuple[np.float32, np.float32]:
    """Top, and sum of the weights, of the scores low .. high of the row that starts at `at`.

    Weights are written as far as they are read for `count` keys.
    """
    raise NotImplementedError


def weigh_part(
    weights: NDArray[np.generic],
    num_queries: int,
    room: int,
    form: NDArray[np.generic],
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    span: Span,
    value_dim: int,
    acc: NDArray[np.float32],
) -> None:
    """acc[(p M + m) 64 + c] = sum of weights times column 64 p + c of the values."""
    raise NotImplementedError


@chosen_by_types(run_queries)
def _run_queries(form: Any, is_latent: Any) -> Any:
    if form.dtype == types.uint32:
        return lambda form, is_latent: _MANY_QUERIES
    return lambda form, is_latent: _MANY_QUERIES if is_latent else _CHAIN_QUERIES


@chosen_by_types(put_weights)
def _put_weights(raw: Any, at: Any, low: Any, high: Any, count: Any, weights: Any) -> Any:
    return _put_rounded if weights.dtype == types.uint16 else _put_wide


@chosen_by_types(weigh_part)
def _weigh_part(
    weights: Any, num_queries: Any, room: Any, form: Any, pool: Any, pages: Any, head: Any,
    table: Any, span: Any, value_dim: Any, acc: Any,
) -> Any:  # fmt: skip
    return _weigh_tiles if form.dtype == types.uint32 else _weigh_chains


# --- FP32 chains ---


def _put_wide(
    raw: NDArray[np.float32], at: int, low: int, high: int, count: int, weights: NDArray[np.float32]
) -> tuple[np.float32, np.float32]:
    visible = raw[at + low : at + high]
    target = weights[at + low : at + high]
    top = lane_max(visible)
    for j in range(visible.size):
        target[j] = exp(visible[j] - top)
    return top, lane_sum(target)


def _weigh_chains(
    weights: NDArray[np.float32],
    num_queries: int,
    room: int,
    form: NDArray[np.float32],
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    span: Span,
    value_dim: int,
    acc: NDArray[np.float32],
) -> None:
    values = scratch_floats(PANEL * PANEL)
    start, _ = visible_keys(span, 0)
    for i in range(acc.size):
        acc[i] = np.float32(0.0)
    for column in range(0, value_dim, PANEL):
        columns = column, min(column + PANEL, value_dim)
        at = column * num_queries
        for begin in range(span.begin, span.stop, PANEL):
            stop = min(begin + PANEL, span.stop)
            visible = max(begin, start), stop
            load_values(pool, pages, head, table, begin, visible, columns, values)
            _extend_chains(weights, num_queries, room, span, (begin, stop), values, acc, at)


@njit
def _extend_chains(
    weights: NDArray[np.float32],
    num_queries: int,
    room: int,
    span: Span,
    keys: tuple[int, int],
    values: NDArray[np.float32],
    acc: NDArray[np.float32],
    acc_at: int,
) -> None:
    """Take in the keys of one panel that each row sees."""
    begin, stop = keys
    rows = num_queries // span.group
    # The last row starts latest and the first row ends first.
    is_shared = begin >= visible_keys(span, rows - 1)[0] and stop <= visible_keys(span, 0)[1]
    runs = 1 if is_shared else rows
    per_run = num_queries // runs
    for run in range(runs):
        low, high = visible_keys(span, run)
        low, high = max(begin, low), min(stop, high)
        if is_shared:
            low, high = begin, stop
        for m in range(run * per_run, (run + 1) * per_run if high > low else 0, MAX_ROWS):
            run_tile(
                min(MAX_ROWS, (run + 1) * per_run - m),
                weights, m * room + low - span.begin, room,
                values, (low - begin) * PANEL, high - low,
                acc, acc_at + m * PANEL,
            )  # fmt: skip


# --- AMX ---


def _put_rounded(
    raw: NDArray[np.float32], at: int, low: int, high: int, count: int, weights: NDArray[np.uint16]
) -> tuple[np.float32, np.float32]:
    padded = -(-count // STEP) * STEP
    top_and_sum: tuple[np.float32, np.float32] = soften(raw, at, low, high, padded, weights, at)
    return top_and_sum


def _weigh_tiles(
    weights: NDArray[np.uint16],
    num_queries: int,
    room: int,
    form: NDArray[np.uint32],
    pool: NDArray[np.uint16],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    span: Span,
    value_dim: int,
    acc: NDArray[np.float32],
) -> None:
    depth = -(-(span.stop - span.begin) // STEP) * STEP
    values = scratch_like(panel_size(form, depth), form)
    start, _ = visible_keys(span, 0)
    most = block_rows(form)
    for column in range(0, value_dim, PANEL):
        columns = column, min(column + PANEL, value_dim)
        load_values(pool, pages, head, table, span.begin, (start, span.stop), columns, values)
        for m in range(0, num_queries, most):
            rows = min(most, num_queries - m)
            if num_queries > most:
                begin_rows(form, rows)
            target = acc[column * num_queries + m * PANEL :]
            multiply(weights, m * room, room, rows, values, 0, depth, None, target)
        for m in range(num_queries if num_queries > span.group else 0):
            at = column * num_queries + m * PANEL
            low, high = visible_keys(span, m // span.group)
            if low < high and not _is_finite(acc[at : at + PANEL]):
                load_values(pool, pages, head, table, span.begin, (low, high), columns, values)
                own_depth = -(-(high - span.begin) // STEP) * STEP
                begin_rows(form, 1)
                multiply(weights, m * room, room, 1, values, 0, own_depth, None, acc[at:])
                begin_rows(form, min(most, num_queries))


@njit
def _is_finite(values: NDArray[np.float32]) -> bool:
    """Neither NaN nor infinite; those of later rows reach a row as 0 times NaN."""
    largest = np.int32(0)
    for i in range(values.size):
        largest = max(largest, float_bits(values[i]) & np.int32(0x7FFFFFFF))
    return bool(largest < np.int32(0x7F800000))
