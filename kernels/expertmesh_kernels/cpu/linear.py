"""Matrix product against packed weights: the only GEMM of the CPU path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.storage import narrow_into, widen_into
from expertmesh_kernels.cpu.tile import MAX_ROWS, PANEL, run_tile

WIDEN_FROM_ROWS = 2 * MAX_ROWS + 1
"""From so many rows on it pays to convert a 16-bit panel once instead of once per tile."""


@njit
def linear(
    x_TnK: NDArray[np.float32],
    panels: NDArray[np.generic],
    bias_N: NDArray[np.float32],
    out_TnN: NDArray[np.generic],
) -> None:
    """out[t, h] = x[t, h] @ weight[h] + bias, rounded once, for each of n heads.

    Args:
        x_TnK: FP32 rows, contiguous.
        panels: Flat [n, ceil(N / 64), K, 64], zero beyond column N.
        bias_N: FP32, or empty.
        out_TnN: Any stored type, contiguous.
    """
    num_rows, num_heads, depth = x_TnK.shape
    columns = out_TnN.shape[2]
    x = x_TnK.reshape(x_TnK.size)
    out = out_TnN.reshape(out_TnN.size)
    for head in range(num_heads):
        linear_rows(
            x, head * depth, num_heads * depth, num_rows,
            panels, head * (panels.size // num_heads), depth, bias_N,
            out, head * columns, num_heads * columns, columns,
        )  # fmt: skip


@njit
def linear_rows(
    x: NDArray[np.float32],
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: NDArray[np.generic],
    panels_at: int,
    depth: int,
    bias_N: NDArray[np.float32],
    out: NDArray[np.generic],
    out_at: int,
    out_stride: int,
    num_columns: int,
) -> None:
    """`linear` for rows that lie `x_stride` apart, into rows `out_stride` apart; all flat."""
    acc = np.empty(MAX_ROWS * PANEL, np.float32)
    is_wide = num_rows >= WIDEN_FROM_ROWS and panels.itemsize < 4
    wide = np.empty(depth * PANEL if is_wide else 0, np.float32)
    for column in range(0, num_columns, PANEL):
        panel_at = panels_at + column * depth
        count = min(PANEL, num_columns - column)
        if is_wide:
            widen_into(panels, panel_at, depth * PANEL, wide, 0)
        for row in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - row)
            row_at = x_at + row * x_stride
            acc[:] = np.float32(0.0)
            if is_wide:
                run_tile(rows, x, row_at, x_stride, wide, 0, depth, acc, 0)
            else:
                run_tile(rows, x, row_at, x_stride, panels, panel_at, depth, acc, 0)
            for r in range(rows):
                _add_bias(acc, r * PANEL, count, bias_N, column)
                narrow_into(acc, r * PANEL, count, out, out_at + (row + r) * out_stride + column)


@njit
def _add_bias(
    acc: NDArray[np.float32], at: int, count: int, bias_N: NDArray[np.float32], column: int
) -> None:
    if bias_N.size > 0:
        target = acc[at : at + count]
        bias = bias_N[column : column + count]
        for c in range(count):
            target[c] += bias[c]
