"""Panels of pairs of bfloat16, [K / 32, 4, 16, 16], as AMX reads them: what is where."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.jit import njit

LANES = 16
_TILE = 256  # pairs of a tile: 16 rows of 16 columns
_STEP_PAIRS = 4 * _TILE


@njit
def place_of(k: int, column: int) -> int:
    """Where a pair of K = k, k + 1 is in the panel."""
    step = k // STEP
    return (step * 4 + column // LANES) * _TILE + (k - step * STEP) // 2 * LANES + column % LANES


@njit
def zero_steps(panel: NDArray[np.uint32], first: int, last: int) -> None:
    """Zeros for the steps first .. last of K."""
    target = panel[first * _STEP_PAIRS : last * _STEP_PAIRS]
    for i in range(target.size):
        target[i] = 0
