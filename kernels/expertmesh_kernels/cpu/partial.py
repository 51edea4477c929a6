"""What attention makes of a part of the keys, and how parts come together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import exp
from expertmesh_kernels.cpu.tile import PANEL


class Partial(NamedTuple):
    """Outputs over some keys, not yet divided, of M query vectors."""

    acc: NDArray[np.float32]
    """Flat [column panels, M, 64]."""
    tops_M: NDArray[np.float32]
    sums_M: NDArray[np.float32]
    """0: of no key."""


@njit
def new_partial(number: int, size: int, value_dim: int) -> Partial:
    """Unset outputs of `number` parts of `size` query vectors each, on the heap."""
    acc = np.empty(number * ceil_panels(value_dim) * size * PANEL, np.float32)
    tops = np.empty(number * size, np.float32)
    return Partial(acc, tops, np.empty(number * size, np.float32))


@njit
def ceil_panels(value_dim: int) -> int:
    """Panels of 64 columns."""
    return -(-value_dim // PANEL)


@njit
def clear(total: Partial) -> None:
    """Of no keys."""
    for i in range(total.acc.size):
        total.acc[i] = np.float32(0.0)
    for m in range(total.tops_M.size):
        total.tops_M[m] = np.float32(-np.inf)
        total.sums_M[m] = np.float32(0.0)


@njit
def keep(part: Partial, partials: Partial, place: int, size: int, num_queries: int) -> None:
    """What a chunk computed, to its place among all."""
    for m in range(num_queries):
        partials.tops_M[place * size + m] = part.tops_M[m]
        partials.sums_M[place * size + m] = part.sums_M[m]
    room = partials.acc.size // partials.tops_M.size * size
    target = partials.acc[place * room : place * room + part.acc.size]
    for i in range(target.size):
        target[i] = part.acc[i]


@njit
def merge(
    total: Partial,
    acc: NDArray[np.float32],
    tops_M: NDArray[np.float32],
    sums_M: NDArray[np.float32],
) -> None:
    """Take in another part; a query that sees no key of it stays as it is."""
    num_queries = tops_M.size
    for m in range(num_queries):
        if sums_M[m] == np.float32(0.0):
            continue
        top = max(total.tops_M[m], tops_M[m])
        own, other = np.float32(0.0), np.float32(1.0)
        if total.sums_M[m] != np.float32(0.0):
            own, other = exp(total.tops_M[m] - top), exp(tops_M[m] - top)
        total.tops_M[m] = top
        total.sums_M[m] = total.sums_M[m] * own + sums_M[m] * other
        for at in range(m * PANEL, acc.size, num_queries * PANEL):
            target, source = total.acc[at : at + PANEL], acc[at : at + PANEL]
            for c in range(PANEL):
                target[c] = target[c] * own + source[c] * other
