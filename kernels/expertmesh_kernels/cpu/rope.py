"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import fma, narrow_like, widen


@njit
def apply_rope(
    x: NDArray[np.generic],
    strides: tuple[int, int],
    num_heads: int,
    positions_T: NDArray[np.int32],
    cos_LD: NDArray[np.float32],
    sin_LD: NDArray[np.float32],
    interleaved: bool,
) -> None:
    """Rotate pairs of each head in place, in FP32, rounded once.

    first = fma(a, cos, -(b * sin)), second = fma(b, cos, a * sin).

    Args:
        x: Flat.
        strides: Distance of two rows, and of two heads of a row.
        num_heads: Heads of a row.
        positions_T: Row of the tables.
        cos_LD: One for each pair.
        sin_LD: Likewise.
        interleaved: Pairs are (2 i, 2 i + 1), else (i, i + half).
    """
    half = cos_LD.shape[1]
    for t in range(positions_T.size):
        cos = cos_LD[positions_T[t]]
        sin = sin_LD[positions_T[t]]
        for head in range(num_heads):
            at = t * strides[0] + head * strides[1]
            values = x[at : at + 2 * half]
            if interleaved:
                _rotate(values[0::2], values[1::2], cos, sin)
            else:
                _rotate(values[:half], values[half:], cos, sin)


@njit
def _rotate(
    first: NDArray[np.generic],
    second: NDArray[np.generic],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
) -> None:
    for i in range(cos.size):
        a = widen(first[i])
        b = widen(second[i])
        first[i] = narrow_like(fma(a, cos[i], -(b * sin[i])), first)
        second[i] = narrow_like(fma(b, cos[i], a * sin[i]), second)
