"""Matrix products of bfloat16 on AMX tiles: up to 32 rows by one panel of 64 columns.

A tile register has 16 rows of 64 bytes. TDPBF16PS adds to each FP32 element of C the products of
one row of A with one column of B, in an order fixed by the instruction; rows do not meet. So a row
has the same bits whatever lies beside it, from 1 row on, and one kernel serves decode and prefill.

Weights of a panel, as B tiles want them: for each 32 features 4 tiles of 16 columns, each tile
16 pairs of features by 16 columns: [K / 32, 4, 16, 16, 2], 4 KiB a step, read front to back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.vectors import prefetch

cgutils: Any = untyped_cgutils

STEP = 32
"""Features of one step; K is padded with zeros to a multiple."""
TILE_ROWS = 16
ROWS = 2 * TILE_ROWS
"""Most rows of a product."""

_COLUMN_TILES = 4
_TILE_BYTES = 1024
STEP_BYTES = _COLUMN_TILES * _TILE_BYTES
ROW_BYTES = 64
_PREFETCH_BYTES = 8192

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ADDRESS = _I8.as_pointer()


def tile_configs() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What LDTILECFG loads for 1..32 rows, [32, 64]."""
    configs = np.zeros((ROWS, 64), np.uint8)
    for rows in range(1, ROWS + 1):
        config = configs[rows - 1]
        config[0] = 1  # palette
        config[16:32].view(np.uint16)[:] = ROW_BYTES
        config[48:56] = _tile_rows(rows)
    return configs


def _tile_rows(rows: int) -> list[int]:
    """Rows of the 8 tiles. Up to 16 rows: C 0-3, A 4, B 5-7; else C 0-3, A 4-5, B 6-7."""
    if rows <= TILE_ROWS:
        return [rows] * 5 + [TILE_ROWS] * 3
    upper, lower = TILE_ROWS, rows - TILE_ROWS
    return [upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS]


def _call(builder: ir.IRBuilder, name: str, kinds: list[Any], values: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), values)


def _zero(builder: ir.IRBuilder, tile: int) -> None:
    _call(builder, "x86.tilezero", [_I8], [_I8(tile)])


def _load(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    kinds, values = [_I8, _ADDRESS, _I64], [_I8(tile), address, stride]
    _call(builder, "x86.tileloadd64", kinds, values)


def _store(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    kinds, values = [_I8, _ADDRESS, _I64], [_I8(tile), address, stride]
    _call(builder, "x86.tilestored64", kinds, values)


def _multiply(builder: ir.IRBuilder, c: int, a: int, b: int) -> None:
    _call(builder, "x86.tdpbf16ps", [_I8] * 3, [_I8(c), _I8(a), _I8(b)])


def _at(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    return builder.gep(address, [_I64(offset)])


def _address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, at: Any) -> Any:
    """Address of element `at` of a contiguous array, in bytes."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _ADDRESS)


def _configure_typing(_context: Any, configs: Any, rows: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        start = builder.mul(builder.sub(args[1], _I64(1)), _I64(64))
        address = _address(context, builder, signature.args[0], args[0], start)
        _call(builder, "x86.ldtilecfg", [_ADDRESS], [address])
        return context.get_dummy_value()

    return types.void(configs, types.intp), codegen


def _release_typing(_context: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        _call(builder, "x86.tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), codegen


configure = cast(Callable[..., None], intrinsic(_configure_typing))
"""`configure(configs, rows)`: shapes of the tiles for products of so many rows, in this thread."""
release = cast(Callable[[], None], intrinsic(_release_typing))
"""Tiles are free again; a context switch saves less."""


def _product_of(ahead: int) -> Callable[..., Any]:
    def typing(_context: Any, x: Any, _1: Any, _2: Any, w: Any, _4: Any, _5: Any, acc: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x_type, w_type, acc_type = (signature.args[i] for i in (0, 3, 6))
            x = _address(context, builder, x_type, args[0], args[1])
            w = _address(context, builder, w_type, args[3], args[4])
            acc = _address(context, builder, acc_type, args[6], _I64(0))
            stride = builder.mul(args[2], _I64(2))
            _emit_product(builder, x, stride, w, args[5], acc, ahead)
            return context.get_dummy_value()

        at = types.intp
        return types.void(x, at, at, w, at, at, acc), codegen

    return typing


def _pair_typing(
    _context: Any, x: Any, _1: Any, _2: Any, w: Any, _4: Any, _5: Any, acc: Any
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x_type, w_type, acc_type = (signature.args[i] for i in (0, 3, 6))
        x = _address(context, builder, x_type, args[0], args[1])
        w = _address(context, builder, w_type, args[3], args[4])
        acc = _address(context, builder, acc_type, args[6], _I64(0))
        stride = builder.mul(args[2], _I64(2))
        for half in range(2):
            columns = _at(builder, w, half * 2 * _TILE_BYTES)
            _emit_pair(builder, x, stride, columns, args[5], _at(builder, acc, half * 128))
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, at, w, at, at, acc), codegen


def _emit_product(
    builder: ir.IRBuilder, x: Any, stride: Any, w: Any, steps: Any, acc: Any, ahead: int
) -> None:
    """Up to 16 rows: one A tile against all 4 column tiles, at the speed of memory.

    Weights are asked for `ahead` bytes before they are read; 0 if they are in the cache.
    """
    clear_few_rows(builder)
    with cgutils.for_range(builder, steps) as loop:
        step = builder.gep(w, [builder.mul(loop.index, _I64(STEP_BYTES))])
        for line in range(0, STEP_BYTES if ahead else 0, 64):
            prefetch(builder, _at(builder, step, ahead + line))
        few_rows_step(
            builder, builder.gep(x, [builder.mul(loop.index, _I64(ROW_BYTES))]), stride, step
        )
    store_few_rows(builder, acc)


def clear_few_rows(builder: ir.IRBuilder) -> None:
    """Emits: the sums of up to 16 rows are 0."""
    for c in range(_COLUMN_TILES):
        _zero(builder, c)


def few_rows_step(builder: ir.IRBuilder, x: ir.Value, stride: ir.Value, step: ir.Value) -> None:
    """Emits: 32 features of up to 16 rows by one step of weights, added to the sums."""
    _load(builder, 4, x, stride)
    for c in range(_COLUMN_TILES):
        tile = 5 + c % 3
        _load(builder, tile, _at(builder, step, c * _TILE_BYTES), _I64(64))
        _multiply(builder, c, 4, tile)


def store_few_rows(builder: ir.IRBuilder, acc: ir.Value) -> None:
    """Emits: the sums of up to 16 rows, to rows of 64."""
    for c in range(_COLUMN_TILES):
        _store(builder, c, _at(builder, acc, c * 64), _I64(256))


def _emit_pair(builder: ir.IRBuilder, x: Any, stride: Any, w: Any, steps: Any, acc: Any) -> None:
    """17 to 32 rows: two A tiles against two column tiles."""
    below = builder.mul(stride, _I64(TILE_ROWS))
    for c in range(4):
        _zero(builder, c)
    with cgutils.for_range(builder, steps) as loop:
        rows = builder.gep(x, [builder.mul(loop.index, _I64(ROW_BYTES))])
        step = builder.gep(w, [builder.mul(loop.index, _I64(STEP_BYTES))])
        _load(builder, 4, rows, stride)
        _load(builder, 5, builder.gep(rows, [below]), stride)
        for c in range(2):
            _load(builder, 6 + c, _at(builder, step, c * _TILE_BYTES), _I64(64))
        for r in range(2):
            for c in range(2):
                _multiply(builder, 2 * r + c, 4 + r, 6 + c)
    for r in range(2):
        for c in range(2):
            _store(builder, 2 * r + c, _at(builder, acc, r * TILE_ROWS * 256 + c * 64), _I64(256))


few_rows = cast(Callable[..., None], intrinsic(_product_of(_PREFETCH_BYTES)))
"""`few_rows(x, x_at, x_stride, w, w_at, steps, acc)`: up to 16 configured rows by a panel.

acc[64 r + c] = sum over k < 32 steps of x[x_at + x_stride r + k] w[k, c]; x flat bfloat16 (uint16),
w flat pairs of bfloat16 (uint32), acc float32.
"""
few_near = cast(Callable[..., None], intrinsic(_product_of(0)))
"""The same for weights that are in the cache."""
many_rows = cast(Callable[..., None], intrinsic(_pair_typing))
"""The same for 17 to 32 rows, with the same bits."""
