"""Panels of keys and values out of pages of int8 codes; formats are those of `panels.py`.

A code times its factor is rounded once, to what the panel holds: FP32, or bfloat16 for AMX.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.int8_pairs import pair_codes_by_column, pair_codes_by_row
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.pages import (
    Int8Pages,
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
    pool: NDArray[np.int8],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.float32],
) -> None:
    """See `load_keys`."""
    scales, size = scales_of(pages), pages.block_size
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
            source = pool[at + d * size : at + d * size + count]
            target = panel[d * PANEL + j - begin : d * PANEL + j - begin + count]
            for i in range(count):
                target[i] = np.float32(source[i]) * own[i]
        j += count


def widen_int8_values(
    pool: NDArray[np.int8],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.float32],
) -> None:
    """See `load_values`."""
    scales, size = scales_of(pages), pages.block_size
    first, width = columns[0], columns[1] - columns[0]
    for j in range(visible[0], visible[1]):
        index = j // size
        offset = j - index * size
        block = int(table[index])
        scale = scales[scales_at(pages, pages.value_scales_at, block, head) + offset]
        at = values_of(pages, block, head) + offset * pages.value_dim + first
        source = pool[at : at + width]
        target = panel[(j - begin) * PANEL : (j - begin) * PANEL + width]
        for c in range(width):
            target[c] = np.float32(source[c]) * scale


# --- pairs of bfloat16 ---


@njit
def _bits(code: np.int8, scale: np.float32) -> np.uint32:
    """bfloat16."""
    return np.uint32(narrow_like(np.float32(code) * scale, _HALVES))


def pair_int8_keys(
    pool: NDArray[np.int8],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    end: int,
    panel: NDArray[np.uint32],
) -> None:
    """See `load_keys`."""
    scales, size = scales_of(pages), pages.block_size
    halves = panel.view(np.uint16)
    j = begin
    while j < end:
        index = j // size
        offset = j - index * size
        block = int(table[index])
        column = j - begin
        room = min(size - offset, PANEL - column)
        scale_at = scales_at(pages, pages.key_scales_at, block, head) + offset
        at = keys_of(pages, block, head) + offset
        count = LANES if room >= LANES and column % LANES == 0 else 1
        for d in range(0, pages.key_dim - 1 if count > 1 else 0, STEP):
            pairs = min(STEP, pages.key_dim - d) // 2
            pair_codes_by_column(
                pool, at + d * size, size, pairs, scales, scale_at, panel, place_of(d, column)
            )
        odd = 0 if count == 1 else pages.key_dim - pages.key_dim % 2
        for d in range(odd, pages.key_dim):
            for i in range(count):
                place = place_of(d, column + i)
                halves[place * 2 + d % 2] = _bits(pool[at + d * size + i], scales[scale_at + i])
        j += count


def pair_int8_values(
    pool: NDArray[np.int8],
    pages: Int8Pages,
    head: int,
    table: NDArray[np.int32],
    begin: int,
    visible: tuple[int, int],
    columns: tuple[int, int],
    panel: NDArray[np.uint32],
) -> None:
    """See `load_values`."""
    scales, size = scales_of(pages), pages.block_size
    halves = panel.view(np.uint16)
    first, width = columns[0], columns[1] - columns[0]
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
        scale_at = scales_at(pages, pages.value_scales_at, block, head) + offset
        at = values_of(pages, block, head) + offset * pages.value_dim + first
        whole = width - width % LANES if pairs > 0 else 0
        for column in range(0, whole, LANES):
            pair_codes_by_row(
                pool, at + column, pages.value_dim, pairs, scales, scale_at, panel,
                place_of(k, column),
            )  # fmt: skip
        for row in range(rows if whole < width else 0):
            source, scale = at + row * pages.value_dim, scales[scale_at + row]
            for column in range(whole, width):
                place = place_of(k + row, column)
                halves[place * 2 + (k + row) % 2] = _bits(pool[source + column], scale)
        j += rows
