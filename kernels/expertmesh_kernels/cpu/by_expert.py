"""Pairs (row, expert) in the order of their experts: a counting sort. N pairs, E experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit


@njit
def order_by_expert(
    experts_N: NDArray[np.integer], counts_E: NDArray[np.int64], order_N: NDArray[np.int64]
) -> None:
    """Counts the pairs of each expert, and sorts pairs by expert, in ascending order within each.

    Args:
        experts_N: Expert of each pair, flat, all below E.
        counts_E: Takes the counts.
        order_N: Takes the pairs.
    """
    for e in range(counts_E.size):
        counts_E[e] = 0
    for n in range(experts_N.size):
        counts_E[experts_N[n]] += 1
    next_E = starts_of(counts_E)
    for n in range(experts_N.size):
        order_N[next_E[experts_N[n]]] = n
        next_E[experts_N[n]] += 1


@njit
def starts_of(counts_E: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each expert's pairs begin in their order, [E + 1]."""
    starts_E = np.empty(counts_E.size + 1, np.int64)
    starts_E[0] = 0
    for e in range(counts_E.size):
        starts_E[e + 1] = starts_E[e] + counts_E[e]
    return starts_E
