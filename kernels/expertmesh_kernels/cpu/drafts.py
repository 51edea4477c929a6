"""Tokens that may come next, found by looking for the latest ones further back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit


@njit
def propose(
    token_ids_SL: NDArray[np.int32],
    slots_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    wanted_N: NDArray[np.int64],
    longest: int,
    shortest: int,
    num_found_N: NDArray[np.int64],
) -> None:
    """Drafts for each row, written behind its tokens; `expertmesh_kernels.drafts` says which."""
    for n in range(slots_N.size):
        tokens = token_ids_SL[slots_N[n]]
        length = lengths_N[n]
        best, best_end = shortest - 1, -1
        end = length - 2
        while end >= 0 and best < longest:
            match = 0
            while (
                match < longest
                and match <= end
                and (tokens[end - match] == tokens[length - 1 - match])
            ):
                match += 1
            if match > best:
                best, best_end = match, end
            end -= 1
        num_found_N[n] = wanted_N[n] if best_end >= 0 else 0
        for i in range(num_found_N[n]):
            tokens[length + i] = tokens[best_end + 1 + i]
