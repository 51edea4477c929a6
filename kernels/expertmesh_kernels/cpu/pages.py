"""Keys and values of one layer inside the blocks of the pool.

The pool is one flat array of equal blocks. A block holds, from `keys_at` on, a layer's keys,
transposed, [num_heads, key_dim, block_size], and from `values_at` on its values,
[num_heads, block_size, value_dim]. So scores are products of query rows with panels of 64 keys, and
weighted sums products of probabilities with panels of 64 value columns.
A latent has no values of its own: they are the leading dimensions of the keys.

Instead of elements of the rows' type a pool may hold int8 codes, which have the layer's factors
before its keys in the block: element = code * factor of its token and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import chosen_by_types, njit
from expertmesh_kernels.cpu.memory import FLOATS, array_at, prefetch
from expertmesh_kernels.cpu.primitives import widen


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


class Int8Pages(NamedTuple):
    """Pages of int8 codes, with an FP32 factor for each key and one for each value of a head.

    Distances are in bytes, those of factors in FP32 numbers; the first nine fields are those of
    `Pages`.
    """

    address: int
    size: int
    block_stride: int
    keys_at: int
    values_at: int
    num_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    key_scales_at: int
    """From the start of a block, [num_heads, block_size]."""
    value_scales_at: int
    """Likewise."""


def is_int8(pages: Any) -> bool:
    """Whether a Numba type is that of `Int8Pages`."""
    return pages.instance_class is Int8Pages


# Stand-ins: what they do is chosen from the types of their arguments when a kernel is compiled.


def pages_of(layer: NDArray[np.generic]) -> Pages:
    """From an array of the fields: one argument instead of many.

    The array is int64 for `Pages`, and uint64 for `Int8Pages`: so its type tells kernels apart.
    """
    raise NotImplementedError


def pool_of(pages: Pages, like: NDArray[np.generic]) -> NDArray[np.generic]:
    """The pool as a flat array of what `pages` counts: elements of the type of `like`, or codes."""
    raise NotImplementedError


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
    raise NotImplementedError


@chosen_by_types(pages_of)
def _pages_of(layer: Any) -> Any:
    return _int8_pages_of if layer.dtype == types.uint64 else _plain_pages_of


@chosen_by_types(pool_of)
def _pool_of(pages: Any, like: Any) -> Any:
    return _int8_pool_of if is_int8(pages) else _plain_pool_of


@chosen_by_types(write_row)
def _write_row(k: Any, k_at: Any, v: Any, v_at: Any, pool: Any, pages: Any, slot: Any) -> Any:
    return write_int8_row if is_int8(pages) else _write_plain_row


def _plain_pages_of(layer: NDArray[np.int64]) -> Pages:
    return Pages(
        layer[0], layer[1], layer[2], layer[3], layer[4], layer[5], layer[6], layer[7], layer[8]
    )


def _plain_pool_of(pages: Pages, like: NDArray[np.generic]) -> NDArray[np.generic]:
    return array_at(pages.address, pages.size, like)


def _int8_pool_of(pages: Int8Pages, like: NDArray[np.generic]) -> NDArray[np.int8]:
    return array_at(pages.address, pages.size, CODES)


def _int8_pages_of(layer: NDArray[np.uint64]) -> Int8Pages:
    f = layer.view(np.int64)
    return Int8Pages(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10])


@njit
def write_kv(
    k_address: int,
    k_stride: int,
    v_address: int,
    v_stride: int,
    layer: NDArray[np.integer],
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
        layer: The fields of `Pages` or `Int8Pages`.
        like: An empty array of the type of rows.
        slots_T: block * block_size + offset for each row.
    """
    pages = pages_of(layer)
    pool = pool_of(pages, like)
    k_width, v_width = pages.num_heads * pages.key_dim, pages.num_heads * pages.value_dim
    last = slots_T.size - 1
    k = array_at(k_address, last * k_stride + k_width if last >= 0 else 0, like)
    v = array_at(v_address, last * v_stride + v_width if last >= 0 else 0, like)
    for t in range(slots_T.size):
        write_row(k, t * k_stride, v, t * v_stride, pool, pages, slots_T[t])


def _write_plain_row(
    k: NDArray[np.generic],
    k_at: int,
    v: NDArray[np.generic],
    v_at: int,
    pool: NDArray[np.generic],
    pages: Pages,
    slot: int,
) -> None:
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
def keys_of(pages: Pages | Int8Pages, block: int, head: int) -> int:
    """Where the keys of a head start: dimension 0 of the block's first token."""
    return block * pages.block_stride + pages.keys_at + head * pages.key_dim * pages.block_size


@njit
def values_of(pages: Pages | Int8Pages, block: int, head: int) -> int:
    return block * pages.block_stride + pages.values_at + head * pages.value_dim * pages.block_size


@njit
def prefetch_part(
    pool: NDArray[np.generic],
    pages: Pages | Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
) -> None:
    """Ask for the blocks of a head that hold tokens begin .. end, all at once.

    They lie here and there, so that reading them one after the other waits for each.
    """
    size = pages.block_size
    for index in range(begin // size, -(-end // size)):
        block = int(table[index])
        prefetch(pool, keys_of(pages, block, head), pages.key_dim * size)
        prefetch(pool, values_of(pages, block, head), pages.value_dim * size)


# --- int8 ---

CODES = np.empty(0, np.int8)
"""For `like`."""
_LARGEST = np.float32(127.0)
_LEAST_PEAK = np.float32(1e-35)
"""A row of smaller numbers becomes zeros: its factor would be subnormal."""


@njit
def scales_of(pages: Int8Pages) -> NDArray[np.float32]:
    """The pool as factors."""
    return array_at(pages.address, pages.size // 4, FLOATS)


@njit
def scales_at(pages: Int8Pages, part_at: int, block: int, head: int) -> int:
    """Where factors of a head start: that of the block's first token."""
    return block * (pages.block_stride // 4) + part_at + head * pages.block_size


def write_int8_row(
    k: NDArray[np.generic],
    k_at: int,
    v: NDArray[np.generic],
    v_at: int,
    pool: NDArray[np.int8],
    pages: Int8Pages,
    slot: int,
) -> None:
    """See `write_row`."""
    scales, size = scales_of(pages), pages.block_size
    block = slot // size
    offset = slot - block * size
    for head in range(pages.num_heads):
        k_row = k[k_at + head * pages.key_dim : k_at + (head + 1) * pages.key_dim]
        at = scales_at(pages, pages.key_scales_at, block, head) + offset
        scales[at] = _quantize(k_row, pool[keys_of(pages, block, head) + offset :], size)
        v_row = v[v_at + head * pages.value_dim : v_at + (head + 1) * pages.value_dim]
        at = scales_at(pages, pages.value_scales_at, block, head) + offset
        values = pool[values_of(pages, block, head) + offset * pages.value_dim :]
        scales[at] = _quantize(v_row, values, 1)


@njit
def _quantize(row: NDArray[np.generic], codes: NDArray[np.int8], stride: int) -> np.float32:
    """The nearest codes (ties to even), `stride` apart; their factor, NaN if not all are finite."""
    peak, total = np.float32(0.0), np.float32(0.0)
    for d in range(row.size):
        value = abs(widen(row[d]))
        peak = max(peak, value)
        total += value * np.float32(0.0)  # NaN as soon as one element is not finite
    is_usual = total == np.float32(0.0) and peak >= _LEAST_PEAK
    factor = _LARGEST / peak if is_usual else np.float32(0.0)
    for d in range(row.size):
        codes[d * stride] = np.int8(np.rint(widen(row[d]) * factor)) if is_usual else np.int8(0)
    return peak / _LARGEST if is_usual else total
