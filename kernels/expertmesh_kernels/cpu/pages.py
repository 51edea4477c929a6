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
from expertmesh_kernels.cpu.primitives import widen
from expertmesh_kernels.cpu.storage import widen_block
from expertmesh_kernels.cpu.tile import PANEL, transpose_strip


class Pages(NamedTuple):
    """Where a layer's keys and values lie; all distances in elements."""

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
def write_kv(
    k: NDArray[np.generic],
    k_stride: int,
    v: NDArray[np.generic],
    v_stride: int,
    pool: NDArray[np.generic],
    pages: Pages,
    slots_T: NDArray[np.int64],
) -> None:
    """Store keys and values of new tokens.

    Args:
        k: Flat keys; row t starts at t * k_stride. Likewise v, which is not read for a latent.
        k_stride: Distance of two rows.
        v: Flat values.
        v_stride: Distance of two rows.
        pool: Flat.
        pages: Where in the pool.
        slots_T: block * block_size + offset for each row.
    """
    size = pages.block_size
    for t in range(slots_T.size):
        block = slots_T[t] // size
        offset = slots_T[t] - block * size
        for head in range(pages.num_heads):
            k_row = k[t * k_stride + head * pages.key_dim :]
            k_at = _keys_of(pages, block, head) + offset
            for d in range(pages.key_dim):
                pool[k_at + d * size] = k_row[d]
            v_row = v[t * v_stride + head * pages.value_dim :]
            v_at = _values_of(pages, block, head) + offset * pages.value_dim
            for d in range(pages.value_dim):
                pool[v_at + d] = v_row[d]


@njit
def _keys_of(pages: Pages, block: int, head: int) -> int:
    """Where the keys of a head start: dimension 0 of the block's first token."""
    return block * pages.block_stride + pages.keys_at + head * pages.key_dim * pages.block_size


@njit
def _values_of(pages: Pages, block: int, head: int) -> int:
    return block * pages.block_stride + pages.values_at + head * pages.value_dim * pages.block_size


@njit
def load_keys(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.float32],
) -> None:
    """panel[d * 64 + j - begin] = k[j, d]; lanes from `end` on may hold anything."""
    size = pages.block_size
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        count = min(size - offset, begin + PANEL - j)  # past `end`, not past the block
        at = _keys_of(pages, int(table[index]), head) + offset
        widen_block(pool, at, size, pages.key_dim, count, panel, j - begin, PANEL)
        j += count


@njit
def load_values(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    value_dim: int,
    panel: NDArray[np.float32],
) -> None:
    """panel[(p * 64 + j - begin) * 64 + c] = v[j, 64 p + c] for begin <= j < end."""
    size = pages.block_size
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        count = min(size - offset, end - j)
        block = int(table[index])
        if pages.value_dim == 0:
            keys_at = _keys_of(pages, block, head) + offset
            _load_latent(pool, keys_at, size, count, size - offset, value_dim, panel, j - begin)
        else:
            values_at = _values_of(pages, block, head) + offset * value_dim
            for column in range(0, value_dim, PANEL):
                width = min(PANEL, value_dim - column)
                panel_at = (column + j - begin) * PANEL
                widen_block(
                    pool, values_at + column, value_dim, count, width, panel, panel_at, PANEL
                )
        j += count


@njit
def _load_latent(
    pool: NDArray[np.generic],
    at: int,
    stride: int,
    count: int,
    limit: int,
    value_dim: int,
    panel: NDArray[np.float32],
    first: int,
) -> None:
    """Values of tokens out of their transposed keys, to rows first, first + 1, ... of the panels.

    16 tokens and dimensions at a time as long as they are in the block, which has `limit` tokens
    from here on; rows after the first `count` may hold anything.
    """
    for strip in range(0, count, 16):
        row = first + strip
        is_whole = strip + 16 <= limit and row + 16 <= PANEL
        whole = value_dim - value_dim % 16 if is_whole else 0
        for d in range(0, whole, 16):
            panel_at = (d // PANEL * PANEL + row) * PANEL + d % PANEL
            transpose_strip(pool, at + d * stride + strip, stride, panel, panel_at, PANEL)
        for d in range(whole, value_dim):
            source = pool[at + d * stride + strip : at + d * stride + min(strip + 16, count)]
            target = panel[(d // PANEL * PANEL + row) * PANEL + d % PANEL :]
            for i in range(source.size):
                target[i * PANEL] = widen(source[i])
