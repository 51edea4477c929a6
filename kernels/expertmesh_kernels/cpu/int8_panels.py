"""Panels of keys and values out of pages of int8 codes; formats are those of `panels.py`.

A code times its factor is rounded once, to what the panel holds: FP32, or bfloat16 for AMX.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.pages import (
    Int8Pages,
    codes_of,
    keys_of,
    scales_at,
    scales_of,
    values_of,
)
from expertmesh_kernels.cpu.pair_panel import LANES, place_of, zero_steps
from expertmesh_kernels.cpu.primitives import narrow_like
from expertmesh_kernels.cpu.tile import PANEL

_HALVES = np.empty(0, np.uint16)


# --- FP32 ---


def widen_int8_keys(
    pool: NDArray[np.generic],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.float32],
) -> None:
    """See `load_keys`."""
    codes, scales, size = codes_of(pages), scales_of(pages), pages.block_size
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        count = min(size - offset, begin + PANEL - j)  # past `end`, not past the block
        block = int(table[index])
        at = scales_at(pages, pages.key_scales_at, block, head) + offset
        own = scales[at : at + count]
        at = keys_of(pages, block, head) + offset
        for d in range(pages.key_dim):
            source = codes[at + d * size : at + d * size + count]
            target = panel[d * PANEL + j - begin : d * PANEL + j - begin + count]
            for i in range(count):
                target[i] = np.float32(source[i]) * own[i]
        j += count


def widen_int8_values(
    pool: NDArray[np.generic],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.float32],
) -> None:
    """See `load_values`."""
    codes, scales, size = codes_of(pages), scales_of(pages), pages.block_size
    first, width = columns[0], columns[1] - columns[0]
    for j in range(visible[0], visible[1]):
        index = j // size
        offset = j - index * size
        block = int(table[index])
        scale = scales[scales_at(pages, pages.value_scales_at, block, head) + offset]
        at = values_of(pages, block, head) + offset * pages.value_dim + first
        source = codes[at : at + width]
        target = panel[(j - begin) * PANEL : (j - begin) * PANEL + width]
        for c in range(width):
            target[c] = np.float32(source[c]) * scale


# --- pairs of bfloat16 ---


@njit
def _bits(code: np.int8, scale: np.float32) -> np.uint32:
    """bfloat16."""
    return np.uint32(narrow_like(np.float32(code) * scale, _HALVES))


def pair_int8_keys(
    pool: NDArray[np.generic],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.uint32],
) -> None:
    """See `load_keys`."""
    codes, scales, size = codes_of(pages), scales_of(pages), pages.block_size
    halves = panel.view(np.uint16)
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        block = int(table[index])
        column = j - begin
        room = min(size - offset, PANEL - column)
        at = scales_at(pages, pages.key_scales_at, block, head) + offset
        own = scales[at : at + LANES]
        at = keys_of(pages, block, head) + offset
        if room >= LANES and column % LANES == 0:
            for d in range(0, pages.key_dim - 1, 2):
                low = codes[at + d * size : at + d * size + LANES]
                high = codes[at + (d + 1) * size : at + (d + 1) * size + LANES]
                place = place_of(d, column)
                _put_pairs(low, high, own, own, panel[place : place + LANES])
            count = LANES
        else:
            count = 1
        odd = 0 if count == 1 else pages.key_dim - pages.key_dim % 2
        for d in range(odd, pages.key_dim):
            for i in range(count):
                place = place_of(d, column + i)
                halves[place * 2 + d % 2] = _bits(codes[at + d * size + i], own[i])
        j += count


@njit
def _put_pairs(
    low: NDArray[np.int8],
    high: NDArray[np.int8],
    low_scales: NDArray[np.float32],
    high_scales: NDArray[np.float32],
    pairs: NDArray[np.uint32],
) -> None:
    """16 pairs."""
    for i in range(LANES):
        upper = _bits(high[i], high_scales[i]) << np.uint32(16)
        pairs[i] = _bits(low[i], low_scales[i]) | upper


def pair_int8_values(
    pool: NDArray[np.generic],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.uint32],
) -> None:
    """See `load_values`."""
    codes, scales, size = codes_of(pages), scales_of(pages), pages.block_size
    halves = panel.view(np.uint16)
    first, width = columns[0], columns[1] - columns[0]
    j, end = visible
    zero_steps(panel, 0, -(-(j - begin) // STEP))
    zero_steps(panel, (end - begin) // STEP, -(-(end - begin) // STEP))
    low_scales, high_scales = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    while j < end:
        index = j // size
        offset = j - index * size
        block = int(table[index])
        k = j - begin
        is_pair = k % 2 == 0 and j + 1 < end and offset + 1 < size
        scale_at = scales_at(pages, pages.value_scales_at, block, head) + offset
        at = values_of(pages, block, head) + offset * pages.value_dim + first
        whole = width - width % LANES if is_pair else 0
        if is_pair:
            for i in range(LANES):
                low_scales[i], high_scales[i] = scales[scale_at], scales[scale_at + 1]
        for column in range(0, whole, LANES):
            low = codes[at + column : at + column + LANES]
            high_at = at + pages.value_dim + column
            high = codes[high_at : high_at + LANES]
            place = place_of(k, column)
            _put_pairs(low, high, low_scales, high_scales, panel[place : place + LANES])
        rows = 2 if is_pair else 1
        for row in range(rows):
            source, scale = at + row * pages.value_dim, scales[scale_at + row]
            for column in range(whole, width):
                place = place_of(k + row, column)
                halves[place * 2 + (k + row) % 2] = _bits(codes[source + column], scale)
        j += rows
