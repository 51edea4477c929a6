"""Linear layers over packed weights, shared out among the team by panels of columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.block import (
    begin_rows,
    block_rows,
    end_rows,
    multiply,
    new_scratch,
    panel_size,
)
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at
from expertmesh_kernels.cpu.scratch import scratch_floats
from expertmesh_kernels.cpu.storage import narrow_into
from expertmesh_kernels.cpu.team import parallel_for
from expertmesh_kernels.cpu.tile import PANEL

CHUNK_BYTES = 192 * 1024
"""Weights of one chunk: some 15 us of reading for few rows, and they stay in L2 for many."""


@njit
def linear(
    x_address: int,
    like_x: NDArray[np.generic],
    x_stride: int,
    num_rows: int,
    panels: NDArray[np.generic],
    depth: int,
    bias_N: NDArray[np.float32],
    out_address: int,
    like_out: NDArray[np.generic],
    num_columns: int,
) -> None:
    """out[t] = x[t] @ weight + bias, rounded once.

    Args:
        x_address: Of rows as `multiply` reads them.
        like_x: Their type.
        x_stride: Distance of two rows.
        num_rows: Rows.
        panels: Flat weights.
        depth: Features, as packed.
        bias_N: FP32, or empty.
        out_address: Of contiguous rows.
        like_out: Their type, any stored one.
        num_columns: N.
    """
    x = array_at(x_address, num_rows * x_stride, like_x)
    out = array_at(out_address, num_rows * num_columns, like_out)
    multiply_panels(x, x_stride, num_rows, panels, depth, bias_N, out, num_columns)


@njit
def multiply_panels(
    x: NDArray[np.generic],
    x_stride: int,
    num_rows: int,
    panels: NDArray[np.generic],
    depth: int,
    bias_N: NDArray[np.float32],
    out: NDArray[np.generic],
    num_columns: int,
) -> None:
    """`linear` of flat arrays."""
    num_panels = -(-num_columns // PANEL)
    per_chunk = panels_per_chunk(panels, depth)
    parallel_for(
        _linear_chunk,
        (x, x_stride, num_rows, panels, depth, bias_N, out, num_columns, per_chunk),
        -(-num_panels // per_chunk),
    )


@njit
def panels_per_chunk(panels: NDArray[np.generic], depth: int) -> int:
    """Panels whose weights make a chunk."""
    return max(1, CHUNK_BYTES // max(1, panel_size(panels, depth) * panels.itemsize))


@njit
def _linear_chunk(
    x: NDArray[np.generic],
    x_stride: int,
    num_rows: int,
    panels: NDArray[np.generic],
    depth: int,
    bias_N: NDArray[np.float32],
    out: NDArray[np.generic],
    num_columns: int,
    per_chunk: int,
    chunk: int,
) -> None:
    most = block_rows(panels)
    acc, scratch = scratch_floats(most * PANEL), new_scratch(panels)
    first = chunk * per_chunk
    last = min(first + per_chunk, -(-num_columns // PANEL))
    for row in range(0, num_rows, most):
        rows = min(most, num_rows - row)
        begin_rows(panels, rows)
        for panel in range(first, last):
            multiply(x, row * x_stride, x_stride, rows, panels, panel, depth, scratch, acc)
            column = panel * PANEL
            count = min(PANEL, num_columns - column)
            add_bias(acc, rows, count, bias_N, column)
            for r in range(rows):
                narrow_into(acc, r * PANEL, count, out, (row + r) * num_columns + column)
    end_rows(panels)


@njit
def add_bias(
    acc: NDArray[np.float32], rows: int, count: int, bias_N: NDArray[np.float32], column: int
) -> None:
    """acc[64 r + c] += bias[column + c] for c < count and all rows, if there is a bias."""
    for r in range(rows if bias_N.size > 0 else 0):
        target = acc[r * PANEL : r * PANEL + count]
        bias = bias_N[column : column + count]
        for c in range(count):
            target[c] += bias[c]


@njit
def head_linear(
    x_TnK: NDArray[np.float32],
    panels: NDArray[np.generic],
    out_TnN: NDArray[np.generic],
) -> None:
    """out[t, h] = x[t, h] @ weight[h], rounded once, for each of n heads.

    Args:
        x_TnK: FP32 rows, contiguous.
        panels: Flat [n, ceil(N / 64), K, 64], zero beyond column N.
        out_TnN: Any stored type, contiguous.
    """
    x = x_TnK.reshape(x_TnK.size)
    out = out_TnN.reshape(out_TnN.size)
    shape = (x_TnK.shape[0], x_TnK.shape[1], x_TnK.shape[2], out_TnN.shape[2])
    parallel_for(_head_chunk, (x, panels, out, shape), x_TnK.shape[1])


@njit
def _head_chunk(
    x: NDArray[np.float32],
    panels: NDArray[np.generic],
    out: NDArray[np.generic],
    shape: tuple[int, int, int, int],
    head: int,
) -> None:
    num_rows, num_heads, depth, num_columns = shape
    most = block_rows(panels)
    acc, scratch = scratch_floats(most * PANEL), new_scratch(panels)
    num_panels = -(-num_columns // PANEL)
    x_stride, out_stride = num_heads * depth, num_heads * num_columns
    for row in range(0, num_rows, most):
        rows = min(most, num_rows - row)
        for panel in range(num_panels):
            x_at = row * x_stride + head * depth
            multiply(
                x, x_at, x_stride, rows, panels, head * num_panels + panel, depth, scratch, acc
            )
            column = panel * PANEL
            count = min(PANEL, num_columns - column)
            for r in range(rows):
                out_at = (row + r) * out_stride + head * num_columns + column
                narrow_into(acc, r * PANEL, count, out, out_at)
