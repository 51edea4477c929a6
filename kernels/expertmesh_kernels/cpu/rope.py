"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import fma, narrow_like, widen


@njit
def apply_rope(
    x: NDArray[np.generic],
    row_stride: int,
    num_heads: int,
    head_dim: int,
    positions_T: NDArray[np.int32],
    cos_LD: NDArray[np.float32],
    sin_LD: NDArray[np.float32],
) -> None:
    """Rotate pairs (i, i + half) of each head in place, in FP32, rounded once.

    first = fma(a, cos, -(b * sin)), second = fma(b, cos, a * sin).
    """
    half = cos_LD.shape[1]
    for t in range(positions_T.size):
        cos = cos_LD[positions_T[t]]
        sin = sin_LD[positions_T[t]]
        for head in range(num_heads):
            at = t * row_stride + head * head_dim
            first = x[at : at + half]
            second = x[at + half : at + 2 * half]
            for i in range(half):
                a = widen(first[i])
                b = widen(second[i])
                first[i] = narrow_like(fma(a, cos[i], -(b * sin[i])), x)
                second[i] = narrow_like(fma(b, cos[i], a * sin[i]), x)
