"""Blocks of rows by one panel of 64 columns: the inner product of all linear layers and experts.

Weights come in three formats, told apart by their stored type:

    panels   [K, 64] of float32, bfloat16 (uint16) or float16 (int16): FP32 chains, any CPU
    tiles    [K / 32, 4, 16, 16] pairs of bfloat16 (uint32): AMX, rows in bfloat16
    coded    codes and scales (a record of one byte, see `cpu.codes`): either way, decoded first

In all a row's bits depend on that row and the panel alone. A block goes through four steps, so
that the loops around it need not know the format: `begin_rows`, `multiply` for each panel,
`end_rows`; and rows are gathered with `gather_row` into what `multiply` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types as untyped_types
from numpy.typing import NDArray

from expertmesh_kernels.cpu import amx, coded
from expertmesh_kernels.cpu.gating import silu_rows
from expertmesh_kernels.cpu.jit import chosen_by_types, intrinsic
from expertmesh_kernels.cpu.primitives import narrow_like, widen
from expertmesh_kernels.cpu.scratch import stack_array
from expertmesh_kernels.cpu.storage import widen_into
from expertmesh_kernels.cpu.tile import MAX_ROWS, PANEL, run_tile

CHAIN_ROWS = 96
"""Rows of a block of FP32 chains; bounds the scratch."""
_WIDEN_FROM_ROWS = 2 * MAX_ROWS + 1
"""From so many rows on it pays to convert a 16-bit panel once instead of once per tile."""
types: Any = untyped_types
_CONFIGS = amx.tile_configs()
_TILE_ROWS = amx.TILE_ROWS
_AMX_ROWS = amx.ROWS
_STEP = amx.STEP


def _is_tiles(panels: Any) -> bool:
    """Whether rows are multiplied on tiles."""
    return bool(panels.dtype == types.uint32) or coded.is_coded_tiles(panels)


# Stand-ins: what they do is chosen from the types of their arguments when a kernel is compiled.


def block_rows(panels: NDArray[np.generic]) -> int:
    """Most rows of a block."""
    raise NotImplementedError


def packed_depth(panels: NDArray[np.generic], depth: int) -> int:
    """Features as packed: with those that are zero."""
    raise NotImplementedError


def panel_size(panels: NDArray[np.generic], depth: int) -> int:
    """Stored elements of a panel of so many packed features."""
    raise NotImplementedError


def new_rows(panels: NDArray[np.generic], size: int) -> Any:
    """Scratch for `size` gathered elements, of the type that `multiply` reads."""
    raise NotImplementedError


def _new_scratch_typing(_context: Any, panels: Any) -> Any:
    if not coded.is_coded(panels):
        return types.none(panels), lambda context, *_: context.get_dummy_value()
    sizes = coded.scratch_sizes(panels)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, _args: Any) -> Any:
        arrays = [
            stack_array(element, context, builder, context.get_constant(types.intp, size))
            for element, size in sizes
        ]
        return context.make_tuple(builder, signature.return_type, arrays)

    kinds = [types.Array(element, 1, "C") for element, _ in sizes]
    return types.Tuple(kinds)(panels), codegen


new_scratch = cast(Callable[[NDArray[Any]], Any], intrinsic(_new_scratch_typing))
"""(panels): what `multiply` needs beside its arguments; for one thread, ends with the caller."""


def _scratch_rows_typing(_context: Any, panels: Any, _size: Any) -> Any:
    element = types.uint16 if _is_tiles(panels) else types.float32

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return stack_array(element, context, builder, args[1])

    return types.Array(element, 1, "C")(panels, types.intp), codegen


scratch_rows = cast(Callable[..., NDArray[Any]], intrinsic(_scratch_rows_typing))
"""(panels, size): `new_rows` as scratch of one call; see `expertmesh_kernels.cpu.scratch`."""


def gather_row(source: NDArray[np.generic], target: NDArray[np.generic]) -> None:
    """One stored row as `multiply` reads it; what is longer in the target becomes zero."""
    raise NotImplementedError


def put_rounded(
    value: np.float32, like: NDArray[np.generic], target: NDArray[Any], at: int
) -> None:
    """target[at] = value rounded to the type of `like`, as `multiply` reads it."""
    raise NotImplementedError


def put_silu(
    acc: NDArray[np.float32],
    rows: int,
    like: NDArray[np.generic],
    target: NDArray[Any],
    at: int,
    stride: int,
) -> bool:
    """target[at + stride r + c] = silu(gate) * up of a panel's sums, as `put_rounded` does it.

    False if there is no quick way for these types, and nothing was done.
    """
    raise NotImplementedError


def begin_rows(panels: NDArray[np.generic], rows: int) -> None:
    """Before the products of a block of so many rows."""
    raise NotImplementedError


def end_rows(panels: NDArray[np.generic]) -> None:
    """After the last product of a thread."""
    raise NotImplementedError


def multiply(
    x: NDArray[np.generic],
    x_at: int,
    x_stride: int,
    rows: int,
    panels: NDArray[np.generic],
    panel: int,
    depth: int,
    scratch: Any,
    acc: NDArray[np.float32],
) -> None:
    """acc[64 r + c] = sum over k < depth of x[x_at + x_stride r + k] w[k, c], in FP32.

    Args:
        x: Flat rows.
        x_at: First element of the block.
        x_stride: Distance of two rows.
        rows: At most `block_rows`.
        panels: Flat weights.
        panel: Which panel.
        depth: Features, as packed.
        scratch: From `new_scratch`.
        acc: At least [rows, 64].
    """
    raise NotImplementedError


@chosen_by_types(block_rows)
def _block_rows(panels: Any) -> Any:
    if coded.is_coded(panels):
        return lambda panels: coded.BLOCK_ROWS
    if _is_tiles(panels):
        return lambda panels: _AMX_ROWS
    return lambda panels: CHAIN_ROWS


@chosen_by_types(packed_depth)
def _packed_depth(panels: Any, depth: Any) -> Any:
    if _is_tiles(panels) or coded.is_coded(panels):
        return lambda panels, depth: -(-depth // _STEP) * _STEP
    return lambda panels, depth: depth


@chosen_by_types(panel_size)
def _panel_size(panels: Any, depth: Any) -> Any:
    if coded.is_coded(panels):
        return coded.coded_panel_size(panels)
    if _is_tiles(panels):
        return lambda panels, depth: depth * (PANEL // 2)
    return lambda panels, depth: depth * PANEL


@chosen_by_types(new_rows)
def _new_rows(panels: Any, size: Any) -> Any:
    if _is_tiles(panels):
        return lambda panels, size: np.empty(size, np.uint16)
    return lambda panels, size: np.empty(size, np.float32)


@chosen_by_types(gather_row)
def _gather_row(source: Any, target: Any) -> Any:
    return _copy_row if source.dtype == target.dtype else _widen_row


def _copy_row(source: NDArray[np.generic], target: NDArray[np.generic]) -> None:
    for i in range(source.size):
        target[i] = source[i]
    for i in range(source.size, target.size):
        target[i] = 0


def _widen_row(source: NDArray[np.generic], target: NDArray[np.float32]) -> None:
    for i in range(source.size):
        target[i] = widen(source[i])
    for i in range(source.size, target.size):
        target[i] = np.float32(0.0)


@chosen_by_types(put_rounded)
def _put_rounded(value: Any, like: Any, target: Any, at: Any) -> Any:
    return _put_wide if target.dtype == types.float32 else _put_narrow


def _put_wide(
    value: np.float32, like: NDArray[np.generic], target: NDArray[np.float32], at: int
) -> None:
    target[at] = widen(narrow_like(value, like))


def _put_narrow(
    value: np.float32, like: NDArray[np.generic], target: NDArray[np.generic], at: int
) -> None:
    target[at] = narrow_like(value, target)


@chosen_by_types(put_silu)
def _put_silu(acc: Any, rows: Any, like: Any, target: Any, at: Any, stride: Any) -> Any:
    if target.dtype == types.float32:
        return lambda acc, rows, like, target, at, stride: False
    return _put_silu_rows


def _put_silu_rows(
    acc: NDArray[np.float32],
    rows: int,
    like: NDArray[np.generic],
    target: NDArray[np.uint16],
    at: int,
    stride: int,
) -> bool:
    silu_rows(acc, rows, target, at, stride)
    return True


@chosen_by_types(begin_rows)
def _begin_rows(panels: Any, rows: Any) -> Any:
    return _configure if _is_tiles(panels) else lambda panels, rows: None


def _configure(panels: NDArray[np.generic], rows: int) -> None:
    amx.configure(_CONFIGS, min(rows, _AMX_ROWS))


@chosen_by_types(end_rows)
def _end_rows(panels: Any) -> Any:
    return _release if _is_tiles(panels) else lambda panels: None


def _release(panels: NDArray[np.generic]) -> None:
    amx.release()


@chosen_by_types(multiply)
def _multiply(
    x: Any, x_at: Any, x_stride: Any, rows: Any, panels: Any, panel: Any, depth: Any, scratch: Any,
    acc: Any,
) -> Any:  # fmt: skip
    if coded.is_coded(panels):
        return coded.multiply_coded(panels)
    return _multiply_tiles if _is_tiles(panels) else _multiply_chains


def _multiply_tiles(
    x: NDArray[np.uint16],
    x_at: int,
    x_stride: int,
    rows: int,
    panels: NDArray[np.uint32],
    panel: int,
    depth: int,
    scratch: None,
    acc: NDArray[np.float32],
) -> None:
    panel_at = panel * depth * (PANEL // 2)
    if rows <= _TILE_ROWS:
        amx.few_rows(x, x_at, x_stride, panels, panel_at, depth // _STEP, acc)
    else:
        amx.many_rows(x, x_at, x_stride, panels, panel_at, depth // _STEP, acc)


def _multiply_chains(
    x: NDArray[np.float32],
    x_at: int,
    x_stride: int,
    rows: int,
    panels: NDArray[np.generic],
    panel: int,
    depth: int,
    scratch: None,
    acc: NDArray[np.float32],
) -> None:
    """Tiles of up to 6 rows, one after the other."""
    acc[: rows * PANEL] = np.float32(0.0)
    panel_at = panel * depth * PANEL
    is_wide = rows >= _WIDEN_FROM_ROWS and panels.itemsize < 4
    wide = np.empty(depth * PANEL if is_wide else 0, np.float32)
    if is_wide:
        widen_into(panels, panel_at, depth * PANEL, wide, 0)
    for row in range(0, rows, MAX_ROWS):
        tile = min(MAX_ROWS, rows - row)
        row_at = x_at + row * x_stride
        if is_wide:
            run_tile(tile, x, row_at, x_stride, wide, 0, depth, acc, row * PANEL)
        else:
            run_tile(tile, x, row_at, x_stride, panels, panel_at, depth, acc, row * PANEL)
