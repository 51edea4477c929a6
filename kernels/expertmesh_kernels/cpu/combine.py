"""Weighted sum of the experts' outputs of each token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import fma, narrow_like, widen
from expertmesh_kernels.cpu.scratch import scratch_floats


@njit
def combine(
    outputs_SH: NDArray[np.generic],
    weights_TK: NDArray[np.float32],
    out_TH: NDArray[np.generic],
) -> None:
    """out[t] = chain acc = fma(weight, output, acc) over the top-k slots in order, from 0."""
    num_tokens, top_k = weights_TK.shape
    acc = scratch_floats(out_TH.shape[1])
    for t in range(num_tokens):
        acc[:] = np.float32(0.0)
        for j in range(top_k):
            weight = weights_TK[t, j]
            source = outputs_SH[t * top_k + j]
            for h in range(acc.size):
                acc[h] = fma(weight, widen(source[h]), acc[h])
        target = out_TH[t]
        for h in range(acc.size):
            target[h] = narrow_like(acc[h], out_TH)
