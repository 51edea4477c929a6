"""RMS normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import fma, narrow_like, widen

_LANES = 16


@njit
def rms_norm(
    x_TH: NDArray[np.generic],
    weight_H: NDArray[np.generic],
    eps: np.float32,
    out_TH: NDArray[np.generic],
) -> None:
    """out = round(x / rms(x)) * weight, rounded again, as Llama does it.

    The sum of squares has 16 chains, chain l over h = l, l + 16, ...; they are added pairwise,
    l with l + 8, then + 4, + 2, + 1. A fixed order, so a row's bits depend on the row alone.
    """
    width = x_TH.shape[1]
    wide = np.zeros(-(-width // _LANES) * _LANES, np.float32)
    sums = np.empty(_LANES, np.float32)
    for t in range(x_TH.shape[0]):
        x = x_TH[t]
        for h in range(width):
            wide[h] = widen(x[h])
        factor = np.float32(1.0) / np.sqrt(_sum_of_squares(wide, sums) / np.float32(width) + eps)
        out = out_TH[t]
        for h in range(width):
            normal = widen(narrow_like(wide[h] * factor, out))
            out[h] = narrow_like(normal * widen(weight_H[h]), out)


@njit
def _sum_of_squares(wide: NDArray[np.float32], sums: NDArray[np.float32]) -> np.float32:
    sums[:] = np.float32(0.0)
    for block in range(wide.size // _LANES):
        values = wide[block * _LANES : block * _LANES + _LANES]
        for lane in range(_LANES):
            sums[lane] = fma(values[lane], values[lane], sums[lane])
    for step in (8, 4, 2, 1):
        for lane in range(step):
            sums[lane] += sums[lane + step]
    return np.float32(sums[0])
