"""Gated FFNs of experts, one row per (row, expert) pair, shared out among the team.

Three forks, with no Python between them: rows are gathered in the order of experts; gate, up and
activation, 32 columns of each per panel; down. The weights of an expert are read once however many
rows it has, and an expert without rows costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.activation import SILU, gated_activation
from expertmesh_kernels.cpu.block import (
    begin_rows,
    block_rows,
    end_rows,
    gather_row,
    multiply,
    new_rows,
    new_scratch,
    packed_depth,
    panel_size,
    put_rounded,
    put_silu,
)
from expertmesh_kernels.cpu.by_expert import order_by_expert, starts_of
from expertmesh_kernels.cpu.combine import combine
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.linear import add_bias, panels_per_chunk
from expertmesh_kernels.cpu.memory import address_of, array_at, optional_floats
from expertmesh_kernels.cpu.scratch import scratch_floats
from expertmesh_kernels.cpu.storage import narrow_into
from expertmesh_kernels.cpu.team import parallel_for
from expertmesh_kernels.cpu.tile import HALF_PANEL, PANEL

GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, NUM_PARTS = 0, 1, 2, 3, 4
"""Columns of a table of experts: addresses of what they consist of, 0 for what they lack."""
_GATHERED_ROWS = 64
"""Rows of a chunk of the gathering."""


@njit
def grouped_mlp(
    x_address: int,
    shape: tuple[int, int],
    like_x: NDArray[np.generic],
    rows_N: NDArray[np.int64],
    experts_N: NDArray[np.int64],
    table_EA: NDArray[np.int64],
    like: NDArray[np.generic],
    width: int,
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    out_address: int,
) -> int:
    """out[n] = down(act(gate(x[row n]), up(x[row n]))) with the expert of pair n.

    The product with `down` takes the activations rounded to the type of x. Returns -1, or the
    first pair, if any, whose expert is not in the table; then nothing is computed.

    Args:
        x_address: Of contiguous rows.
        shape: Of the rows.
        like_x: An empty array of the type of rows and outputs.
        rows_N: Row of each pair.
        experts_N: Expert of each pair.
        table_EA: See `GATE_UP`.
        like: The first bytes of packed weights if they describe themselves, else an empty array
            of their type.
        width: I.
        kind: Of the activation; see `expertmesh_kernels.cpu.activation`.
        alpha: Of the activation.
        limit: Of the activation.
        out_address: Of contiguous outputs, one a pair.
    """
    for n in range(rows_N.size):
        if experts_N[n] >= table_EA.shape[0] or table_EA[experts_N[n], GATE_UP] == 0:
            return n
    counts_E = np.empty(table_EA.shape[0], np.int64)
    order_N = np.empty(rows_N.size, np.int64)
    order_by_expert(experts_N, counts_E, order_N)
    _ordered_mlp(
        x_address, shape, like_x, rows_N, counts_E, order_N, table_EA, like, width, kind, alpha,
        limit, out_address,
    )  # fmt: skip
    return -1


@njit
def _ordered_mlp(
    x_address: int,
    shape: tuple[int, int],
    like_x: NDArray[np.generic],
    rows_N: NDArray[np.int64],
    counts_E: NDArray[np.int64],
    order_N: NDArray[np.int64],
    table_EA: NDArray[np.int64],
    like: NDArray[np.generic],
    width: int,
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    out_address: int,
) -> None:
    """`grouped_mlp` of pairs that were counted and ordered by expert; none is missing."""
    num_pairs, hidden = rows_N.size, shape[1]
    x_RH = array_at(x_address, shape[0] * hidden, like_x).reshape(shape)
    out = array_at(out_address, num_pairs * hidden, like_x)
    depth, act_depth = packed_depth(like, hidden), packed_depth(like, width)
    starts_E = starts_of(counts_E)
    groups = (starts_E, _used(starts_E), table_EA)
    num_used = groups[1].size
    x = new_rows(like, num_pairs * depth)
    act = new_rows(like, num_pairs * act_depth)
    parallel_for(
        _gather_chunk, (x_RH, rows_N, order_N, depth, x), _ceil_div(num_pairs, _GATHERED_ROWS)
    )
    per_chunk = panels_per_chunk(like, depth)
    chunks = _ceil_div(_ceil_div(width, HALF_PANEL), per_chunk)
    parallel_for(
        _gate_up_chunk,
        (
            x, depth, groups, like, width, kind, alpha, limit, x_RH[:0], act, act_depth,
            per_chunk, chunks,
        ),
        num_used * chunks,
    )  # fmt: skip
    per_chunk = panels_per_chunk(like, act_depth)
    chunks = _ceil_div(_ceil_div(hidden, PANEL), per_chunk)
    parallel_for(
        _down_chunk,
        (act, act_depth, groups, like, order_N, out, hidden, per_chunk, chunks),
        num_used * chunks,
    )


@njit
def combined_mlp(
    h_address: int,
    shape: tuple[int, int],
    like_h: NDArray[np.generic],
    weights_TK: NDArray[np.float32],
    counts_E: NDArray[np.int64],
    order_N: NDArray[np.int64],
    table_EA: NDArray[np.int64],
    like: NDArray[np.generic],
    width: int,
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    out_address: int,
) -> int:
    """`grouped_mlp` of all top-k slots of all rows, and their weighted sums; see `combine`.

    Args:
        h_address: Of contiguous rows.
        shape: Of the rows.
        like_h: An empty array of the type of rows and outputs.
        weights_TK: Of the router, as the next two.
        counts_E: Slots of each expert.
        order_N: Slots in the order of experts.
        table_EA: See `grouped_mlp`, as for the rest.
    """
    num_rows, top_k = weights_TK.shape
    wrong_pair = _first_missing(counts_E, order_N, table_EA)
    if wrong_pair >= 0:
        return wrong_pair
    rows_N = np.empty(num_rows * top_k, np.int64)
    for n in range(rows_N.size):
        rows_N[n] = n // top_k
    outputs = np.empty(rows_N.size * shape[1], like_h.dtype)
    _ordered_mlp(
        h_address, shape, like_h, rows_N, counts_E, order_N, table_EA, like, width, kind, alpha,
        limit, address_of(outputs),
    )  # fmt: skip
    out_TH = array_at(out_address, num_rows * shape[1], like_h).reshape(shape)
    outputs_SH = outputs.reshape((rows_N.size, shape[1]))
    parallel_for(
        _combine_chunk, (outputs_SH, weights_TK, out_TH), _ceil_div(num_rows, _GATHERED_ROWS)
    )
    return -1


@njit
def _combine_chunk(
    outputs_SH: NDArray[np.generic],
    weights_TK: NDArray[np.float32],
    out_TH: NDArray[np.generic],
    chunk: int,
) -> None:
    top_k = weights_TK.shape[1]
    first = chunk * _GATHERED_ROWS
    last = min(first + _GATHERED_ROWS, weights_TK.shape[0])
    combine(outputs_SH[first * top_k : last * top_k], weights_TK[first:last], out_TH[first:last])


@njit
def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@njit
def _first_missing(
    counts_E: NDArray[np.int64], order_N: NDArray[np.int64], table_EA: NDArray[np.int64]
) -> int:
    """The first pair whose expert is not in the table; -1 if none."""
    first, start = -1, 0
    for e in range(counts_E.size):
        if counts_E[e] > 0 and (e >= table_EA.shape[0] or table_EA[e, GATE_UP] == 0):
            pair = int(order_N[start])
            first = pair if first < 0 else min(first, pair)
        start += counts_E[e]
    return first


@njit
def _used(starts_E: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts with pairs; a loop, since NumPy's function takes long to compile."""
    used_E = np.empty(starts_E.size - 1, np.int64)
    count = 0
    for e in range(used_E.size):
        if starts_E[e + 1] > starts_E[e]:
            used_E[count] = e
            count += 1
    return used_E[:count]


@njit
def _gather_chunk(
    x_RH: NDArray[np.generic],
    rows_N: NDArray[np.int64],
    order_N: NDArray[np.int64],
    depth: int,
    x: NDArray[np.generic],
    chunk: int,
) -> None:
    first = chunk * _GATHERED_ROWS
    for n in range(first, min(first + _GATHERED_ROWS, order_N.size)):
        gather_row(x_RH[rows_N[order_N[n]]], x[n * depth : (n + 1) * depth])


@njit
def _gate_up_chunk(
    x: NDArray[np.generic],
    depth: int,
    groups: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    like: NDArray[np.generic],
    width: int,
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    rounded: NDArray[np.generic],
    act: NDArray[np.generic],
    act_depth: int,
    per_chunk: int,
    chunks: int,
    chunk: int,
) -> None:
    """Activations of one expert's rows, for some panels, in the order of experts."""
    starts_E, used_U, table_EA = groups
    expert = used_U[chunk // chunks]
    num_panels = _ceil_div(width, HALF_PANEL)
    panels = array_at(table_EA[expert, GATE_UP], num_panels * panel_size(like, depth), like)
    bias = optional_floats(table_EA[expert, GATE_UP_BIAS], 2 * width)
    first = (chunk % chunks) * per_chunk
    last = min(first + per_chunk, num_panels)
    begin, end = starts_E[expert], starts_E[expert + 1]
    most = min(block_rows(like), end - begin)
    acc, scratch = scratch_floats(most * PANEL), new_scratch(like)
    gated = scratch_floats(most * HALF_PANEL).reshape((most, HALF_PANEL))
    for row in range(begin, end, most):
        rows = min(most, end - row)
        begin_rows(like, rows)
        for panel in range(first, last):
            multiply(x, row * depth, depth, rows, panels, panel, depth, scratch, acc)
            column = panel * HALF_PANEL
            biased = min(HALF_PANEL, width - column)
            add_bias(acc, rows, biased, bias, column)
            add_bias(acc[HALF_PANEL:], rows, biased, bias, width + column)
            count = min(HALF_PANEL, act_depth - column)
            at = row * act_depth + column
            is_whole = kind == SILU and count == HALF_PANEL
            if is_whole and put_silu(acc, rows, rounded, act, at, act_depth):
                continue
            gate_up = acc.reshape((most, PANEL))[:rows]
            gated_activation(gate_up, kind, alpha, limit, gated[:rows])
            for r in range(rows):
                for c in range(count):
                    put_rounded(gated[r, c], rounded, act, at + r * act_depth + c)
    end_rows(like)


@njit
def _down_chunk(
    act: NDArray[np.generic],
    depth: int,
    groups: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    like: NDArray[np.generic],
    order_N: NDArray[np.int64],
    out: NDArray[np.generic],
    hidden: int,
    per_chunk: int,
    chunks: int,
    chunk: int,
) -> None:
    """Outputs of one expert's rows, for some panels, at the places of their pairs."""
    starts_E, used_U, table_EA = groups
    expert = used_U[chunk // chunks]
    num_panels = _ceil_div(hidden, PANEL)
    panels = array_at(table_EA[expert, DOWN], num_panels * panel_size(like, depth), like)
    bias = optional_floats(table_EA[expert, DOWN_BIAS], hidden)
    first = (chunk % chunks) * per_chunk
    last = min(first + per_chunk, num_panels)
    begin, end = starts_E[expert], starts_E[expert + 1]
    most = min(block_rows(like), end - begin)
    acc, scratch = scratch_floats(most * PANEL), new_scratch(like)
    for row in range(begin, end, most):
        rows = min(most, end - row)
        begin_rows(like, rows)
        for panel in range(first, last):
            multiply(act, row * depth, depth, rows, panels, panel, depth, scratch, acc)
            column = panel * PANEL
            count = min(PANEL, hidden - column)
            add_bias(acc, rows, count, bias, column)
            for r in range(rows):
                narrow_into(acc, r * PANEL, count, out, order_N[row + r] * hidden + column)
    end_rows(like)
