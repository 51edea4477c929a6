"""Products of rows with quantised weights, which are decoded a slice of features at a time.

A slice of one panel is decoded into scratch that stays in the cache, multiplied with all rows of
the block, and the sums are scaled and added up in FP32. Up to 16 rows on tiles are multiplied with
each step of a slice while the next one is decoded (`cpu.coded_tiles`): the same products and sums.
So the cost of decoding is that of reading the codes, whatever the number of rows; and as slices
depend on the weights alone, a row's bits do not depend on the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from expertmesh.formats.coded import CodeName
from expertmesh_kernels.cpu import amx
from expertmesh_kernels.cpu.coded_tiles import few_coded
from expertmesh_kernels.cpu.codes import (
    CODE_BITS,
    HEADER_BYTES,
    add_scaled,
    codes_of,
    decode,
    group_overhead,
    stored_group,
)
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.tile import MAX_ROWS, PANEL, run_tile

BLOCK_ROWS = 192
"""Rows that share the decoding of a panel: enough that it costs little beside their products."""
SLICE = 256
"""Most features that are decoded at a time: 32 KiB in bfloat16, 64 in FP32."""

_CONFIGS = amx.tile_configs()
_AMX_ROWS = amx.ROWS
_TILE_ROWS = amx.TILE_ROWS
_STEP = amx.STEP

Scratch = tuple[NDArray[Any], NDArray[np.float32]]


def is_coded(panels: Any) -> bool:
    """Whether the weights are quantised, by their Numba type."""
    return codes_of(panels.dtype) is not None


def is_coded_tiles(panels: Any) -> bool:
    """Whether they are, and multiplied on tiles."""
    found = codes_of(panels.dtype)
    return found is not None and found[1]


def coded_panel_size(panels: Any) -> Any:
    """`block.panel_size` for these codes."""
    bits, overhead = _sizes(panels)

    def size(panels: Any, depth: int) -> int:
        return _panel_bytes(depth, group_size(panels, depth), bits, overhead)

    return size


def _sizes(panels: Any) -> tuple[int, int]:
    """Bits of a code and bytes of a group before its codes."""
    found = codes_of(panels.dtype)
    assert found is not None
    codes: CodeName = found[0]
    return CODE_BITS[codes], group_overhead(codes)


@njit
def _panel_bytes(depth: int, group: int, bits: int, overhead: int) -> int:
    return HEADER_BYTES + -(-depth // group) * overhead + depth * PANEL * bits // 8


@njit
def group_size(panels: NDArray[np.void], depth: int) -> int:
    """Features that share a scale."""
    group = stored_group(panels)
    return group if group > 0 else depth


def scratch_sizes(panels: Any) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """Types and sizes of a slice of decoded features, and of the sums of a block of rows."""
    if is_coded_tiles(panels):
        return (types.uint32, SLICE * PANEL // 2), (types.float32, _AMX_ROWS * PANEL)
    return (types.float32, SLICE * PANEL), (types.float32, MAX_ROWS * PANEL)


def multiply_coded(panels: Any) -> Any:
    """`block.multiply`, on tiles that are configured for `min(rows, 32)` or in FP32 chains."""
    bits, overhead = _sizes(panels)
    multiply_slice = _slice_on_tiles if is_coded_tiles(panels) else _slice_in_chains

    def multiply(
        x: NDArray[Any],
        x_at: int,
        x_stride: int,
        rows: int,
        panels: NDArray[np.void],
        panel: int,
        depth: int,
        scratch: Scratch,
        acc: NDArray[np.float32],
    ) -> None:
        weights, partial = scratch
        clear(acc, rows * PANEL)
        group = group_size(panels, depth)
        codes_at = panel * _panel_bytes(depth, group, bits, overhead) + HEADER_BYTES
        for first in range(0, depth, group):
            group_at = codes_at
            codes_at += overhead
            end = min(first + group, depth)
            for start in range(first, end, SLICE):
                steps = min(SLICE, end - start) // _STEP
                multiply_slice(
                    x, x_at + start, x_stride, rows, panels, group_at, codes_at, steps, weights,
                    partial, acc,
                )  # fmt: skip
                codes_at += steps * _STEP * PANEL * bits // 8

    return multiply


@njit
def _slice_on_tiles(
    x: NDArray[np.uint16],
    x_at: int,
    x_stride: int,
    rows: int,
    panels: NDArray[np.void],
    group_at: int,
    codes_at: int,
    steps: int,
    weights: NDArray[np.uint32],
    partial: NDArray[np.float32],
    acc: NDArray[np.float32],
) -> None:
    """acc += scale * (rows times decoded features), 32 rows at a time."""
    if rows <= _TILE_ROWS:
        few_coded(x, x_at, x_stride, panels, group_at, codes_at, steps, weights, partial)
        add_scaled(panels, group_at, partial, rows, acc, 0)
        return
    decode(panels, group_at, codes_at, steps, weights)
    most = min(rows, _AMX_ROWS)
    for row in range(0, rows, _AMX_ROWS):
        count = min(_AMX_ROWS, rows - row)
        if count != most:
            amx.configure(_CONFIGS, count)
        row_at = x_at + row * x_stride
        if count <= _TILE_ROWS:
            amx.few_near(x, row_at, x_stride, weights, 0, steps, partial)
        else:
            amx.many_rows(x, row_at, x_stride, weights, 0, steps, partial)
        add_scaled(panels, group_at, partial, count, acc, row * PANEL)
    if rows % most > 0:
        amx.configure(_CONFIGS, most)


@njit
def _slice_in_chains(
    x: NDArray[np.float32],
    x_at: int,
    x_stride: int,
    rows: int,
    panels: NDArray[np.void],
    group_at: int,
    codes_at: int,
    steps: int,
    weights: NDArray[np.float32],
    partial: NDArray[np.float32],
    acc: NDArray[np.float32],
) -> None:
    """The same with chains over the features of the slice, 6 rows at a time."""
    decode(panels, group_at, codes_at, steps, weights)
    for row in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - row)
        clear(partial, count * PANEL)
        row_at = x_at + row * x_stride
        run_tile(count, x, row_at, x_stride, weights, 0, steps * _STEP, partial, 0)
        add_scaled(panels, group_at, partial, count, acc, row * PANEL)


@njit
def clear(acc: NDArray[np.float32], count: int) -> None:
    """acc[:count] = 0."""
    for i in range(count):
        acc[i] = np.float32(0.0)
