"""Rows as int8 with one scale each, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import narrow_like, widen

_LARGEST = np.float32(127.0)
_LEAST_MAXIMUM = np.float32(1e-35)
"""A row of smaller numbers becomes zeros: its scale would be subnormal."""


@njit
def quantize_rows(
    source_TH: NDArray[np.generic],
    row_ids_R: NDArray[np.int64],
    out_RH: NDArray[np.int8],
    scales_R: NDArray[np.float32],
    broken_T: NDArray[np.bool_],
) -> int:
    """out[r] * scales[r] = source[row_ids[r]], rounded to nearest even.

    Zeros for a row with a NaN or infinite element, which is marked. Returns how many are.
    """
    num_broken = 0
    hidden_size = source_TH.shape[1]
    for r in range(row_ids_R.size):
        source, target = source_TH[row_ids_R[r]], out_RH[r]
        most = np.float32(0.0)
        total = np.float32(0.0)
        for h in range(hidden_size):
            value = abs(widen(source[h]))
            most = max(most, value)
            total += value * np.float32(0.0)  # NaN as soon as one element is not finite
        scales_R[r] = np.float32(0.0)
        target[:] = 0
        if total != np.float32(0.0):
            broken_T[row_ids_R[r]] = True
            num_broken += 1
            continue
        if most < _LEAST_MAXIMUM:
            continue
        scales_R[r] = most / _LARGEST
        factor = _LARGEST / most
        for h in range(hidden_size):
            target[h] = np.int8(np.rint(widen(source[h]) * factor))
    return num_broken


@njit
def dequantize_rows(
    source_RH: NDArray[np.int8], scales_R: NDArray[np.float32], out_RH: NDArray[np.generic]
) -> int:
    """out[r] = source[r] * scales[r], rounded. The first row that is not finite then, or -1."""
    first_broken = -1
    for r in range(source_RH.shape[0]):
        source, target, scale = source_RH[r], out_RH[r], scales_R[r]
        total = np.float32(0.0)
        for h in range(source.size):
            target[h] = narrow_like(np.float32(source[h]) * scale, out_RH)
            total += widen(target[h]) * np.float32(0.0)
        if total != np.float32(0.0) and first_broken < 0:
            first_broken = r
    return first_broken
