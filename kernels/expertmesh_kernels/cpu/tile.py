"""The one inner loop of all matrix products: a register tile of FP32 accumulators.

A tile is `rows` x 64 outputs. Its accumulators live in vector registers while k runs; each is one
chain acc = fma(x[k], w[k], acc) in ascending k, so tile shape and neighbours can't change a bit.
Weights lie in panels [K, 64]: what the loop reads next is what lies next in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import intrinsic, njit
from expertmesh_kernels.cpu.primitives import narrow_ir, widen_ir
from expertmesh_kernels.cpu.vectors import (
    ADDRESS,
    F32,
    FLOATS,
    I16,
    I64,
    INTS,
    LANES,
    LINE_BYTES,
    byte_at,
    element_at,
    everywhere,
    fma,
    prefetch,
    store,
)

cgutils: Any = untyped_cgutils

PANEL = 64
"""Columns of a panel."""
HALF_PANEL = PANEL // 2
"""Columns of the gate, and as many of up, in a panel of gate and up."""
MAX_ROWS = 6
"""Rows of the largest tile: 24 accumulator vectors of 16 lanes, of the 32 registers of AVX-512."""

_VECTORS = PANEL // LANES

_PREFETCH_UP_TO_ROWS = 4
_PREFETCH_BYTES = 1024

Tile = Callable[..., None]


def _make_tile(rows: int) -> Tile:
    """The tile for a fixed number of rows: `tile(x, x_at, x_stride, w, w_at, depth, acc, acc_at)`.

    For r < rows, k < depth and c < 64, with w in any stored type and the rest float32:
    acc[acc_at + 64 r + c] = fma(x[x_at + x_stride r + k], w[w_at + 64 k + c], acc[...])
    """

    def typing(
        _context: Any, x: Any, _1: Any, _2: Any, w: Any, _4: Any, _5: Any, acc: Any, _7: Any
    ) -> Any:
        at = types.intp
        return types.void(x, at, at, w, at, at, acc, at), codegen

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x_type, w_type, acc_type = (signature.args[i] for i in (0, 3, 6))
        x = element_at(context, builder, x_type, args[0], args[1])
        w = element_at(context, builder, w_type, args[3], args[4])
        acc = element_at(context, builder, acc_type, args[6], args[7])
        _emit_tile(builder, rows, x, args[2], w, w_type.dtype, args[5], acc)
        return context.get_dummy_value()

    return cast(Tile, intrinsic(typing))


def _emit_tile(
    builder: ir.IRBuilder,
    rows: int,
    x: Any,
    x_stride: Any,
    w: Any,
    w_dtype: Any,
    depth: Any,
    acc: Any,
) -> None:
    """Emit load accumulators, loop over k, store accumulators."""
    places = [_vector_at(builder, acc, PANEL * r + LANES * v) for r, v in _grid(rows)]
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in places]  # LLVM keeps these in registers
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(place, align=4), total)
    with cgutils.for_range(builder, depth) as loop:
        k = loop.index
        w_k = builder.gep(w, [builder.mul(k, ir.Constant(k.type, PANEL))])
        if rows <= _PREFETCH_UP_TO_ROWS:
            _emit_prefetch(builder, w_k, w_dtype)
        columns = [_load_weights(builder, w_k, v, w_dtype) for v in range(_VECTORS)]
        scalars = [_load_scalar(builder, x, x_stride, r, k) for r in range(rows)]
        for (r, v), total in zip(_grid(rows), sums, strict=True):
            builder.store(fma(builder, scalars[r], columns[v], builder.load(total)), total)
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), place, align=4)


def _emit_prefetch(builder: ir.IRBuilder, w_k: Any, w_dtype: Any) -> None:
    """Ask for weights `_PREFETCH_BYTES` ahead; an address past the end is harmless."""
    base = builder.bitcast(w_k, ADDRESS)
    for line in range(0, PANEL * element_size(w_dtype), LINE_BYTES):
        prefetch(builder, byte_at(builder, base, _PREFETCH_BYTES + line))


def _grid(rows: int) -> list[tuple[int, int]]:
    return [(r, v) for r in range(rows) for v in range(_VECTORS)]


def _load_scalar(builder: ir.IRBuilder, x: Any, x_stride: Any, row: int, k: Any) -> Any:
    """x[row * x_stride + k] in all lanes."""
    at = builder.add(builder.mul(x_stride, ir.Constant(x_stride.type, row)), k)
    return everywhere(builder, builder.load(builder.gep(x, [at])))


def _vector_at(builder: ir.IRBuilder, pointer: Any, offset: int, element: Any = F32) -> Any:
    address = builder.gep(pointer, [I64(offset)])
    return builder.bitcast(address, ir.VectorType(element, LANES).as_pointer())


def _load_weights(builder: ir.IRBuilder, w_k: Any, vector: int, dtype: Any) -> Any:
    element = F32 if dtype == types.float32 else I16
    place = _vector_at(builder, w_k, LANES * vector, element)
    return widen_ir(builder, builder.load(place, align=element_size(dtype)), dtype, FLOATS)


def element_size(dtype: Any) -> int:
    """Bytes of one stored element, which is also what its alignment can be relied on."""
    return 4 if dtype == types.float32 else 2


def _widen_typing(
    _context: Any, stored: Any, _1: Any, _2: Any, _3: Any, wide: Any, _5: Any, _6: Any
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source = element_at(context, builder, stored, args[0], args[1])
        target = element_at(context, builder, wide, args[4], args[5])
        with cgutils.for_range(builder, args[3]) as loop:
            row = builder.gep(source, [builder.mul(loop.index, args[2])])
            wide_row = builder.gep(target, [builder.mul(loop.index, args[6])])
            value = _load_weights(builder, row, 0, stored.dtype)
            builder.store(value, _vector_at(builder, wide_row, 0), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(stored, at, at, at, wide, at, at), codegen


widen_strip = cast(Callable[..., None], intrinsic(_widen_typing))
"""`widen_strip(stored, at, stride, count, wide, wide_at, wide_stride)`: 16 columns to FP32.

wide[wide_at + i * wide_stride + c] = stored[at + i * stride + c] for i < count and c < 16.
"""


def _narrow_typing(_context: Any, wide: Any, _1: Any, _2: Any, stored: Any, _4: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source = element_at(context, builder, wide, args[0], args[1])
        target = element_at(context, builder, stored, args[3], args[4])
        with cgutils.for_range(builder, args[2]) as loop:
            first = builder.mul(loop.index, loop.index.type(LANES))
            value = builder.load(_vector_at(builder, builder.gep(source, [first]), 0), align=4)
            value = narrow_ir(builder, value, stored.dtype)
            place = builder.gep(target, [first])
            store(builder, value, place, align=element_size(stored.dtype))
        return context.get_dummy_value()

    at = types.intp
    return types.void(wide, at, at, stored, at), codegen


narrow_strips = cast(Callable[..., None], intrinsic(_narrow_typing))
"""`narrow_strips(wide, wide_at, count, stored, at)`: 16 x count elements rounded.

stored[at + c] = wide[wide_at + c] for c < 16 count.
"""


def _add_typing(_context: Any, x: Any, y: Any, total: Any, _3: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        zero = I64(0)
        arrays = ((x, args[0]), (y, args[1]), (total, args[2]))
        places = [element_at(context, builder, kind, array, zero) for kind, array in arrays]
        with cgutils.for_range(builder, args[3]) as loop:
            first = builder.mul(loop.index, loop.index.type(LANES))
            a, b, target = (builder.gep(place, [first]) for place in places)
            terms = [_load_weights(builder, part, 0, x.dtype) for part in (a, b)]
            value = narrow_ir(builder, builder.fadd(*terms), total.dtype)
            store(builder, value, target, align=element_size(total.dtype))
        return context.get_dummy_value()

    return types.void(x, y, total, types.intp), codegen


add_strips = cast(Callable[..., None], intrinsic(_add_typing))
"""`add_strips(x, y, total, count)`: total = x + y, rounded, for 16 x count elements of one type.

`total` may be x or y.
"""


def _scale_typing(_context: Any, x: Any, _1: Any, _2: Any, target: Any, _4: Any, _5: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source = element_at(context, builder, x, args[0], I64(0))
        place = element_at(context, builder, target, args[3], args[4])
        factor = everywhere(builder, args[2])
        with cgutils.for_range(builder, args[1]) as loop:
            row = builder.gep(source, [builder.mul(loop.index, loop.index.type(PANEL))])
            out = builder.gep(place, [builder.mul(loop.index, args[5])])
            for column in range(0, PANEL, LANES):
                value = builder.load(_vector_at(builder, row, column), align=4)
                value = builder.fmul(value, factor)
                builder.store(value, _vector_at(builder, out, column), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, types.float32, target, at, at), codegen


scale_rows = cast(Callable[..., None], intrinsic(_scale_typing))
"""`scale_rows(x, rows, factor, target, at, stride)`: rows of 64, all of FP32.

target[at + r * stride + c] = x[64 r + c] * factor for r < rows and c < 64.
"""


def _transpose_typing(
    _context: Any, stored: Any, _1: Any, _2: Any, wide: Any, _4: Any, _5: Any
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        source = element_at(context, builder, stored, args[0], args[1])
        target = element_at(context, builder, wide, args[3], args[4])
        rows = []
        for i in range(LANES):
            row = builder.gep(source, [builder.mul(args[2], ir.Constant(args[2].type, i))])
            rows.append(_load_weights(builder, row, 0, stored.dtype))
        for i, column in enumerate(_transposed(builder, rows)):
            place = builder.gep(target, [builder.mul(args[5], ir.Constant(args[5].type, i))])
            builder.store(column, _vector_at(builder, place, 0), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(stored, at, at, wide, at, at), codegen


def _transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Swap the off-diagonal blocks of size 8, then 4, 2, 1: the transpose of 16 vectors."""
    rows = list(rows)
    for step in (8, 4, 2, 1):
        lanes = range(LANES)
        upper = [lane + LANES - step if lane & step else lane for lane in lanes]
        lower = [lane + LANES if lane & step else lane + step for lane in lanes]
        masks = [ir.Constant(INTS, mask) for mask in (upper, lower)]
        for i in (row for row in lanes if not row & step):
            pair = rows[i], rows[i + step]
            rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    return rows


transpose_strip = cast(Callable[..., None], intrinsic(_transpose_typing))
"""`transpose_strip(stored, at, stride, wide, wide_at, wide_stride)`: 16 x 16 elements to FP32.

wide[wide_at + j * wide_stride + i] = stored[at + i * stride + j] for i, j < 16.
"""

_tile_1 = _make_tile(1)
_tile_2 = _make_tile(2)
_tile_3 = _make_tile(3)
_tile_4 = _make_tile(4)
_tile_5 = _make_tile(5)
_tile_6 = _make_tile(6)


@njit
def run_tile(
    rows: int,
    x: NDArray[np.float32],
    x_at: int,
    x_stride: int,
    w: NDArray[np.generic],
    w_at: int,
    depth: int,
    acc: NDArray[np.float32],
    acc_at: int,
) -> None:
    """Extend the chains of 1..6 rows x 64 columns by `depth` terms; all arrays are flat."""
    if rows == 6:
        _tile_6(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
    elif rows == 5:
        _tile_5(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
    elif rows == 4:
        _tile_4(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
    elif rows == 3:
        _tile_3(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
    elif rows == 2:
        _tile_2(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
    else:
        _tile_1(x, x_at, x_stride, w, w_at, depth, acc, acc_at)
