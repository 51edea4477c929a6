"""Keys and values of one layer inside the blocks of the pool.

The pool is one flat array of equal blocks. A block holds, from `keys_at` on, a layer's keys,
transposed, [num_heads, key_dim, block_size], and from `values_at` on its values,
[num_heads, block_size, value_dim]. So scores are products of query rows with panels of 64 keys, and
weighted sums products of probabilities with panels of 64 value columns.
A latent has no values of its own: they are the leading dimensions of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at


class Pages(NamedTuple):
    """Where a layer's keys and values lie; all distances in elements."""

    address: int
    """Of the pool."""
    size: int
    """Of the pool."""
    block_stride: int
    """From block to block."""
    keys_at: int
    """From the start of a block."""
    values_at: int
    num_heads: int
    key_dim: int
    value_dim: int
    """Of stored values; 0 for a latent."""
    block_size: int
    """Tokens of a block."""


@njit
def pages_of(layer: NDArray[np.int64]) -> Pages:
    """From an array of the fields: one argument instead of nine."""
    return Pages(
        layer[0], layer[1], layer[2], layer[3], layer[4], layer[5], layer[6], layer[7], layer[8]
    )


@njit
def write_kv(
    k_address: int,
    k_stride: int,
    v_address: int,
    v_stride: int,
    layer: NDArray[np.int64],
    like: NDArray[np.generic],
    slots_T: NDArray[np.int64],
) -> None:
    """Store keys and values of new tokens.

    Args:
        k_address: Of the keys; row t starts t * k_stride elements later. Likewise v, which is not
            read for a latent.
        k_stride: Distance of two rows.
        v_address: Of the values.
        v_stride: Distance of two rows.
        layer: The fields of `Pages`.
        like: An empty array of the stored type.
        slots_T: block * block_size + offset for each row.
    """
    pages = pages_of(layer)
    pool = array_at(pages.address, pages.size, like)
    k_width, v_width = pages.num_heads * pages.key_dim, pages.num_heads * pages.value_dim
    last = slots_T.size - 1
    k = array_at(k_address, last * k_stride + k_width if last >= 0 else 0, like)
    v = array_at(v_address, last * v_stride + v_width if last >= 0 else 0, like)
    for t in range(slots_T.size):
        write_row(k, t * k_stride, v, t * v_stride, pool, pages, slots_T[t])


@njit
def write_row(
    k: NDArray[np.generic],
    k_at: int,
    v: NDArray[np.generic],
    v_at: int,
    pool: NDArray[np.generic],
    pages: Pages,
    slot: int,
) -> None:
    """One token's keys and values."""
    size = pages.block_size
    block = slot // size
    offset = slot - block * size
    for head in range(pages.num_heads):
        k_row = k[k_at + head * pages.key_dim : k_at + (head + 1) * pages.key_dim]
        keys = pool[keys_of(pages, block, head) + offset :]
        for d in range(pages.key_dim):
            keys[d * size] = k_row[d]
        v_row = v[v_at + head * pages.value_dim : v_at + (head + 1) * pages.value_dim]
        values = pool[values_of(pages, block, head) + offset * pages.value_dim :]
        for d in range(pages.value_dim):
            values[d] = v_row[d]


@njit
def keys_of(pages: Pages, block: int, head: int) -> int:
    """Where the keys of a head start: dimension 0 of the block's first token."""
    return block * pages.block_stride + pages.keys_at + head * pages.key_dim * pages.block_size


@njit
def values_of(pages: Pages, block: int, head: int) -> int:
    return block * pages.block_stride + pages.values_at + head * pages.value_dim * pages.block_size
