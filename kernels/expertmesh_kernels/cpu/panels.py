"""Panels of 64 keys, or of values, out of the pages of one head, as the products read them.

Two formats, told apart by the type of the panel (see `expertmesh_kernels.cpu.block`):

    float32   [K, 64], for FP32 chains
    uint32    [K / 32, 4, 16, 16] pairs of bfloat16, for AMX; K is padded with zeros

Pages may hold int8 codes with factors: they are decoded on the way (`int8_panels.py`).
For scores K runs over dimensions and the 64 columns are keys; for weighted sums K runs over keys
and the columns are dimensions of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.int8_panels import (
    pair_int8_keys,
    pair_int8_values,
    widen_int8_keys,
    widen_int8_values,
)
from expertmesh_kernels.cpu.jit import chosen_by_types, njit
from expertmesh_kernels.cpu.pages import Pages, is_int8, keys_of, values_of
from expertmesh_kernels.cpu.pair_panel import LANES, place_of, zero_steps
from expertmesh_kernels.cpu.pairs import pair_strip
from expertmesh_kernels.cpu.primitives import widen
from expertmesh_kernels.cpu.storage import widen_block
from expertmesh_kernels.cpu.tile import PANEL, transpose_strip

# Stand-ins: what they do is chosen from the type of the panel when a kernel is compiled.


def load_keys(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.generic],
) -> None:
    """Keys begin .. end, at most 64; columns from `end` on may hold anything."""
    raise NotImplementedError


def load_values(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.generic],
) -> None:
    """Columns first .. last, at most 64, of the values of `visible` keys; key `begin` is K = 0.

    What is not visible may be anything in FP32, and is zero in bfloat16, up to a whole step.
    """
    raise NotImplementedError


@chosen_by_types(load_keys)
def _load_keys(
    pool: Any, pages: Any, head: Any, table: Any, begin: Any, end: Any, panel: Any
) -> Any:
    if is_int8(pages):
        return pair_int8_keys if panel.dtype == types.uint32 else widen_int8_keys
    return _pair_keys if panel.dtype == types.uint32 else _widen_keys


@chosen_by_types(load_values)
def _load_values(
    pool: Any, pages: Any, head: Any, table: Any, begin: Any, visible: Any, columns: Any, panel: Any
) -> Any:
    if is_int8(pages):
        return pair_int8_values if panel.dtype == types.uint32 else widen_int8_values
    return _pair_values if panel.dtype == types.uint32 else _widen_values


# --- FP32 ---


def _widen_keys(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.float32],
) -> None:
    size = pages.block_size
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        count = min(size - offset, begin + PANEL - j)  # past `end`, not past the block
        at = keys_of(pages, int(table[index]), head) + offset
        widen_block(pool, at, size, pages.key_dim, count, panel, j - begin, PANEL)
        j += count


def _widen_values(
    pool: NDArray[np.generic],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.float32],
) -> None:
    size = pages.block_size
    first, width = columns[0], columns[1] - columns[0]
    j, end = visible
    while j < end:
        index = j // size
        offset = j - index * size
        count = min(size - offset, end - j)
        block = int(table[index])
        row = j - begin
        if pages.value_dim == 0:
            at = keys_of(pages, block, head) + first * size + offset
            _widen_latent(pool, at, size, count, size - offset, width, panel, row)
        else:
            at = values_of(pages, block, head) + offset * pages.value_dim + first
            widen_block(pool, at, pages.value_dim, count, width, panel, row * PANEL, PANEL)
        j += count


@njit
def _widen_latent(
    pool: NDArray[np.generic],
    at: int,
    stride: int,
    count: int,
    limit: int,
    width: int,
    panel: NDArray[np.float32],
    first: int,
) -> None:
    """Values of tokens out of their transposed keys, to rows first, first + 1, ... of the panel.

    16 tokens and dimensions at a time as long as they are in the block, which has `limit` tokens
    from here on; rows after the first `count` may hold anything.
    """
    num_rows = panel.size // PANEL
    for strip in range(0, count, LANES):
        row = first + strip
        is_whole = strip + LANES <= limit and row + LANES <= num_rows
        whole = width - width % LANES if is_whole else 0
        for d in range(0, whole, LANES):
            transpose_strip(pool, at + d * stride + strip, stride, panel, row * PANEL + d, PANEL)
        for d in range(whole, width):
            source = pool[at + d * stride + strip : at + d * stride + min(strip + LANES, count)]
            target = panel[row * PANEL + d :]
            for i in range(source.size):
                target[i * PANEL] = widen(source[i])


# --- pairs of bfloat16 ---


def _pair_keys(
    pool: NDArray[np.uint16],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.uint32],
) -> None:
    size, depth = pages.block_size, pages.key_dim
    halves = panel.view(np.uint16)
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        at = keys_of(pages, int(table[index]), head) + offset
        column = j - begin
        room = min(size - offset, PANEL - column)
        if room >= LANES and column % LANES == 0:
            for d in range(0, depth - 1, STEP):
                pairs = min(STEP, depth - d) // 2
                pair_strip(pool, at + d * size, size, pairs, panel, place_of(d, column))
            if depth % 2 > 0:
                for i in range(LANES):
                    halves[place_of(depth - 1, column + i) * 2] = pool[at + (depth - 1) * size + i]
            j += LANES
        else:
            for d in range(depth):
                halves[place_of(d, column) * 2 + d % 2] = pool[at + d * size]
            j += 1


def _pair_values(
    pool: NDArray[np.uint16],
    pages: Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.uint32],
) -> None:
    size, (first, last) = pages.block_size, columns
    j, end = visible
    zero_steps(panel, 0, -(-(j - begin) // STEP))
    zero_steps(panel, (end - begin) // STEP, -(-(end - begin) // STEP))
    while j < end:
        index = j // size
        offset = j - index * size
        block = int(table[index])
        k = j - begin
        pairs = min(size - offset, end - j, STEP - k % STEP) // 2 if k % 2 == 0 else 0
        rows = max(2 * pairs, 1)
        if pages.value_dim == 0:
            at = keys_of(pages, block, head) + first * size + offset
            _pair_latent(pool, at, size, rows, last - first, panel, k)
        else:
            at = values_of(pages, block, head) + offset * pages.value_dim + first
            _pair_rows(pool, at, pages.value_dim, rows, last - first, panel, k)
        j += rows


@njit
def _pair_rows(
    pool: NDArray[np.uint16],
    at: int,
    stride: int,
    rows: int,
    width: int,
    panel: NDArray[np.uint32],
    k: int,
) -> None:
    """Rows of values as K = k, k + 1, ...: all of one step, in pairs, or a single one."""
    halves = panel.view(np.uint16)
    whole = width - width % LANES if rows > 1 else 0
    for column in range(0, whole, LANES):
        pair_strip(pool, at + column, stride, rows // 2, panel, place_of(k, column))
    for row in range(rows if whole < width else 0):
        for column in range(whole, width):
            halves[place_of(k + row, column) * 2 + (k + row) % 2] = pool[at + row * stride + column]


@njit
def _pair_latent(
    pool: NDArray[np.uint16],
    at: int,
    stride: int,
    rows: int,
    width: int,
    panel: NDArray[np.uint32],
    k: int,
) -> None:
    """Likewise, where adjacent rows are adjacent in memory and columns `stride` apart."""
    halves = panel.view(np.uint16)
    for column in range(width):
        source = pool[at + column * stride : at + column * stride + rows]
        place = place_of(k, column)
        if rows == 1:
            halves[place * 2 + k % 2] = source[0]
        for pair in range(rows // 2):
            low, high = np.uint32(source[2 * pair]), np.uint32(source[2 * pair + 1])
            panel[place + pair * LANES] = low | high << np.uint32(16)
