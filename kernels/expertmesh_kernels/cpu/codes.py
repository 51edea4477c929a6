"""Quantised weights as kernels read them: codes, scales, and vectors made of codes.

Weights of a panel of 64 columns, as bytes, front to back:

    header     64 bytes: int64 features that share a scale, 0 if all of a column do
    group      64 FP32 scales; for int4 also 64 offsets, 15 - zero point; then its codes
    ...        the next group

Codes lie in steps of 32 features, 4 tiles of 16 columns, 16 pairs of features, as `cpu.amx` wants
weights: a line is one pair of features in 16 columns. A chunk is 64 bytes of codes. Every code
stands for a number that bfloat16 holds exactly, so decoding rounds nothing; the scale multiplies
the sum of a group in FP32.

What lies in a chunk: see `cpu.code_vectors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types as untyped_types
from numba.core import cgutils as untyped_cgutils

from expertmesh.formats.coded import CodeName
from expertmesh_kernels.cpu.code_vectors import LINES_OF, PAIRS_OF, byte_address
from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.vectors import (
    FLOATS,
    I8,
    I64,
    INTS,
    LANES,
    byte_at,
    fma,
    load,
    prefetch,
    store,
)

cgutils: Any = untyped_cgutils
types: Any = untyped_types

HEADER_BYTES = 64
SCALE_BYTES = 256
OFFSET_BYTES = 64
"""Of a group."""
STEP = 32
CODE_BITS: dict[CodeName, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}

_LINE_BYTES = 64
_CHUNK_BYTES = 64
_PREFETCH_BYTES = 4096
_LINES = 64
"""Of a step."""
_PAIRS = 16
_PANEL = 64


def stored_type(codes: CodeName, *, tiles: bool) -> np.dtype[np.void]:
    """Type of a byte of packed weights, which tells kernels what it means.

    Args:
        codes: What the codes are.
        tiles: Multiplied on AMX tiles, with rows in bfloat16; else as FP32 chains.
    """
    return np.dtype([(f"{codes}_{'tiles' if tiles else 'chains'}", np.uint8)])


def codes_of(dtype: Any) -> tuple[CodeName, bool] | None:
    """Codes and whether they are for tiles, of a Numba type; None for plain weights."""
    if not isinstance(dtype, types.Record):
        return None
    ((name, _),) = dtype.fields.items()
    codes, way = name.split("_")
    return codes, way == "tiles"


def group_overhead(codes: CodeName) -> int:
    """Bytes of a group before its codes."""
    return SCALE_BYTES + (OFFSET_BYTES if codes == "int4" else 0)


# --- whole steps ---


def _decode_typing(_context: Any, panels: Any, _1: Any, _2: Any, _3: Any, scratch: Any) -> Any:
    codes, tiles = cast("tuple[CodeName, bool]", codes_of(panels.dtype))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kinds = signature.args
        group = byte_address(context, builder, kinds[0], args[0], args[1])
        source = byte_address(context, builder, kinds[0], args[0], args[2])
        target = byte_address(context, builder, kinds[4], args[4], I64(0))
        offsets = offset_vectors(builder, codes, group)
        with cgutils.for_range(builder, args[3]) as loop:
            step = builder.gep(source, [builder.mul(loop.index, I64(step_bytes(codes)))])
            size = STEP * _PANEL * (2 if tiles else 4)
            out = builder.gep(target, [builder.mul(loop.index, I64(size))])
            emit_step(builder, codes, tiles, step, offsets, out)
        return context.get_dummy_value()

    at = types.intp
    return types.void(panels, at, at, at, scratch), codegen


def step_bytes(codes: CodeName) -> int:
    """Bytes of the codes of a step."""
    return _LINES * 4 * CODE_BITS[codes]


def emit_step(
    builder: ir.IRBuilder, codes: CodeName, tiles: bool, step: Any, offsets: list[Any], out: Any
) -> None:
    """One step of codes as `multiply` takes weights, to `out`."""
    emit = _emit_tile if tiles else _emit_chains
    for tile in range(_LINES // _PAIRS):
        emit(builder, codes, tile, step, offsets[tile], out)


def offset_vectors(builder: ir.IRBuilder, codes: CodeName, group: Any) -> list[Any]:
    """Offsets of the columns of each tile, in all lanes."""
    if codes != "int4":
        return [None] * (_LINES // _PAIRS)
    bytes_16 = ir.VectorType(I8, LANES)
    places = [byte_at(builder, group, SCALE_BYTES + LANES * t) for t in range(_LINES // _PAIRS)]
    return [builder.zext(load(builder, place, bytes_16), INTS) for place in places]


def _chunks(codes: CodeName) -> tuple[int, int]:
    """Lines of a chunk, and chunks of a tile."""
    lines = 16 // CODE_BITS[codes]
    return lines, _PAIRS // lines


def _emit_tile(
    builder: ir.IRBuilder, codes: CodeName, tile: int, step: Any, offsets: Any, out: Any
) -> None:
    """A tile of B: 16 lines, one below the other."""
    lines, chunks = _chunks(codes)
    first = builder.gep(step, [I64(tile * chunks * _CHUNK_BYTES)])
    target = builder.gep(out, [I64(tile * _PAIRS * _LINE_BYTES)])
    with cgutils.for_range(builder, I64(chunks)) as loop:
        chunk = builder.gep(first, [builder.mul(loop.index, I64(_CHUNK_BYTES))])
        place = builder.gep(target, [builder.mul(loop.index, I64(lines * _LINE_BYTES))])
        prefetch(builder, byte_at(builder, chunk, _PREFETCH_BYTES))
        for j, line in enumerate(PAIRS_OF[codes](builder, chunk, offsets)):
            store(builder, line, byte_at(builder, place, j * _LINE_BYTES))


def _emit_chains(
    builder: ir.IRBuilder, codes: CodeName, tile: int, step: Any, offsets: Any, out: Any
) -> None:
    """16 columns of rows of FP32, one row a feature."""
    lines, chunks = _chunks(codes)
    row_bytes = 4 * _PANEL
    first = builder.gep(step, [I64(tile * chunks * _CHUNK_BYTES)])
    target = builder.gep(out, [I64(tile * _LINE_BYTES)])
    with cgutils.for_range(builder, I64(chunks)) as loop:
        chunk = builder.gep(first, [builder.mul(loop.index, I64(_CHUNK_BYTES))])
        place = builder.gep(target, [builder.mul(loop.index, I64(2 * lines * row_bytes))])
        for j, line in enumerate(LINES_OF[codes](builder, chunk, offsets)):
            for parity, part in enumerate(line):
                store(builder, part, byte_at(builder, place, (2 * j + parity) * row_bytes))


decode = cast(Callable[..., None], intrinsic(_decode_typing))
"""`decode(panels, group_at, codes_at, steps, scratch)`: steps of codes as `multiply` takes weights.

In tiles, pairs of bfloat16 as in `cpu.amx`; else [32 steps, 64] FP32.
"""


def _add_typing(
    _context: Any, panels: Any, _1: Any, partial: Any, _3: Any, acc: Any, _5: Any
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kinds = signature.args
        group = byte_address(context, builder, kinds[0], args[0], args[1])
        source = byte_address(context, builder, kinds[2], args[2], I64(0))
        offset = builder.mul(args[5], I64(4))
        target = byte_address(context, builder, kinds[4], args[4], offset)
        vectors = range(0, 4 * _PANEL, _LINE_BYTES)
        scales = [load(builder, byte_at(builder, group, at), FLOATS) for at in vectors]
        with cgutils.for_range(builder, args[3]) as loop:
            row = builder.mul(loop.index, I64(4 * _PANEL))
            for at, scale in zip(vectors, scales, strict=True):
                place = byte_at(builder, builder.gep(target, [row]), at)
                term = load(builder, byte_at(builder, builder.gep(source, [row]), at), FLOATS)
                total = fma(builder, term, scale, load(builder, place, FLOATS))
                store(builder, total, place)
        return context.get_dummy_value()

    at = types.intp
    return types.void(panels, at, partial, at, acc, at), codegen


add_scaled = cast(Callable[..., None], intrinsic(_add_typing))
"""`add_scaled(panels, group_at, partial, rows, acc, acc_at)`: partial sums times their scales.

acc[acc_at + 64 r + c] = fma(partial[64 r + c], scale[c], acc[...]) for r < rows, c < 64.
"""


def _header_typing(_context: Any, panels: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        place = byte_address(context, builder, signature.args[0], args[0], I64(0))
        return builder.load(builder.bitcast(place, I64.as_pointer()), align=1)

    return types.intp(panels), codegen


stored_group = cast(Callable[..., int], intrinsic(_header_typing))
"""Features that share a scale as the header says, 0 for all."""
