"""Loops between stored arrays (float32, bfloat16 as uint16, float16 as int16) and FP32 scratch."""

from __future__ import annotations

import numpy as np
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import narrow_like, widen
from numpy.typing import NDArray


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
def narrow_into(
    wide: NDArray[np.float32], wide_at: int, count: int, stored: NDArray[np.generic], at: int
) -> None:
    """stored[at : at + count] = wide[wide_at : wide_at + count], rounded; both flat."""
    source = wide[wide_at : wide_at + count]
    target = stored[at : at + count]
    for i in range(count):
        target[i] = narrow_like(source[i], stored)
