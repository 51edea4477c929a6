"""Loops between stored arrays and FP32 scratch, and reductions in a fixed order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import narrow_like, widen
from expertmesh_kernels.cpu.tile import narrow_strips, widen_strip


@njit
def widen_into(
    stored: NDArray[np.generic], at: int, count: int, wide: NDArray[np.float32], wide_at: int
) -> None:
    """wide[wide_at : wide_at + count] = stored[at : at + count], exactly; both flat."""
    source = stored[at : at + count]  # slices: no check for negative indices inside the loop
    target = wide[wide_at : wide_at + count]
    for i in range(count):
        target[i] = widen(source[i])


@njit
def widen_block(
    stored: NDArray[np.generic],
    at: int,
    stride: int,
    rows: int,
    columns: int,
    wide: NDArray[np.float32],
    wide_at: int,
    wide_stride: int,
) -> None:
    """wide[wide_at + i * wide_stride + c] = stored[at + i * stride + c], exactly; both flat."""
    whole = columns - columns % 16
    for c in range(0, whole, 16):
        widen_strip(stored, at + c, stride, rows, wide, wide_at + c, wide_stride)
    for i in range(rows if whole < columns else 0):
        for c in range(whole, columns):
            wide[wide_at + i * wide_stride + c] = widen(stored[at + i * stride + c])


@njit
def narrow_into(
    wide: NDArray[np.float32], wide_at: int, count: int, stored: NDArray[np.generic], at: int
) -> None:
    """stored[at : at + count] = wide[wide_at : wide_at + count], rounded; both flat."""
    narrow_strips(wide, wide_at, count // 16, stored, at)
    for i in range(count - count % 16, count):
        stored[at + i] = narrow_like(wide[wide_at + i], stored)


@njit
def lane_sum(values: NDArray[np.float32]) -> np.float32:
    """Sum in a fixed order: 16 chains, chain l over i = l, l + 16, ...; then added pairwise.

    Chain l takes in chain l + 8, then l + 4, l + 2, l + 1. The order depends on the length alone.
    """
    lanes = np.zeros(16, np.float32)
    whole = values.size - values.size % 16
    for block in range(0, whole, 16):
        row = values[block : block + 16]
        for lane in range(16):
            lanes[lane] += row[lane]
    for i in range(whole, values.size):
        lanes[i - whole] += values[i]
    for step in (8, 4, 2, 1):
        for lane in range(step):
            lanes[lane] += lanes[lane + step]
    return np.float32(lanes[0])


@njit
def lane_max(values: NDArray[np.float32]) -> np.float32:
    """The largest value that is not NaN; -inf if there is none."""
    lanes = np.full(16, np.float32(-np.inf), np.float32)
    whole = values.size - values.size % 16
    for block in range(0, whole, 16):
        row = values[block : block + 16]
        for lane in range(16):
            lanes[lane] = row[lane] if row[lane] > lanes[lane] else lanes[lane]
    for i in range(whole, values.size):
        lanes[i - whole] = values[i] if values[i] > lanes[i - whole] else lanes[i - whole]
    for lane in range(1, 16):
        lanes[0] = lanes[lane] if lanes[lane] > lanes[0] else lanes[0]
    return np.float32(lanes[0])
