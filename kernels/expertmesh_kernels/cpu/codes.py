"""Quantised weights as kernels read them: codes, scales, and vectors made of codes.

Weights of a panel of 64 columns, as bytes, front to back:

    header     64 bytes: int64 features that share a scale, 0 if all of a column do
    group      64 FP32 scales; for int4 also 64 offsets, 15 - zero point; then its codes
    ...        the next group

Codes lie in steps of 32 features, 4 tiles of 16 columns, 16 pairs of features, as `cpu.amx` wants
weights: a line is one pair of features in 16 columns. A chunk is 64 bytes of codes. Every code
stands for a number that bfloat16 holds exactly, so decoding rounds nothing; the scale multiplies
the sum of a group in FP32.

    int8   2 lines: 16 bytes of the even features, 16 of the odd ones, two's complement
    fp8    2 lines: bytes 0 and 2 of each dword, bytes 1 and 3; E4M3
    int4   4 lines: nibble j of the words of each dword, of 0 to 15
    mxfp4  4 lines: likewise; E2M1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types as untyped_types
from numba.core import cgutils as untyped_cgutils
from numpy.typing import NDArray

from expertmesh.formats.coded import CodeName
from expertmesh_kernels.cpu.jit import intrinsic

cgutils: Any = untyped_cgutils
types: Any = untyped_types

HEADER_BYTES = 64
SCALE_BYTES = 256
OFFSET_BYTES = 64
"""Of a group."""
STEP = 32
CODE_BITS: dict[CodeName, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}
LARGEST_OFFSET = 15
"""Less a zero point of 0 to 15, so that code plus offset is 0 to 30."""

_LANES = 16
_LINE_BYTES = 64
_CHUNK_BYTES = 64
_LINES = 64
"""Of a step."""
_PAIRS = 16
_PANEL = 64
_PREFETCH_BYTES = 4096

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_BYTES = ir.VectorType(_I8, 64)
_WORDS = ir.VectorType(_I16, 32)
_INTS = ir.VectorType(_I32, _LANES)
_FLOATS = ir.VectorType(_FLOAT, _LANES)
_ADDRESS = _I8.as_pointer()


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


# --- vectors of constants and memory ---


def _splat(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.gep(address, [_I64(offset)])


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=4)


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """Address of the byte `offset` of an array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, _ADDRESS), [offset])


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_ADDRESS] + [_I32] * 3)
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [_I32(flag) for flag in (0, 3, 1)]  # for reading, near, data
    builder.call(prefetch, [_at(builder, address, _PREFETCH_BYTES), *flags])


def _bfloat16_bits(values: NDArray[np.float32]) -> list[int]:
    return [int(bits) for bits in values.view(np.uint32) >> 16]


# --- codes to FP32, on any CPU: for each line the even features and the odd ones ---

Line = tuple[Any, Any]


def _bits(builder: Any, words: Any, shift: int, count: int) -> Any:
    shifted = builder.lshr(words, _splat(_INTS, shift)) if shift else words
    return builder.and_(shifted, _splat(_INTS, (1 << count) - 1))


def _int8_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    def part(index: int) -> Any:
        stored = _load(builder, _at(builder, chunk, _LANES * index), ir.VectorType(_I8, _LANES))
        return builder.sitofp(builder.sext(stored, _INTS), _FLOATS)

    return [(part(0), part(1)), (part(2), part(3))]


def _small_floats(builder: Any, codes: Any, bits: int, mantissa: int, bias: int) -> Any:
    """Codes of sign, exponent and mantissa, subnormal ones too, as FP32."""
    magnitude = builder.and_(codes, _splat(_INTS, (1 << bits - 1) - 1))
    sign = builder.and_(codes, _splat(_INTS, 1 << bits - 1))
    magnitude = builder.shl(magnitude, _splat(_INTS, 23 - mantissa))
    magnitude = builder.bitcast(magnitude, _FLOATS)
    scale = ir.Constant(_FLOATS, [2.0 ** (127 - bias)] * _LANES)
    value = builder.bitcast(builder.fmul(magnitude, scale), _INTS)
    sign = builder.shl(sign, _splat(_INTS, 32 - bits))
    return builder.bitcast(builder.or_(value, sign), _FLOATS)


def _fp8_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    words = _load(builder, chunk, _INTS)

    def part(shift: int) -> Any:
        return _small_floats(builder, _bits(builder, words, shift, 8), 8, 3, 7)

    return [(part(0), part(16)), (part(8), part(24))]


def _mxfp4_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    words = _load(builder, chunk, _INTS)

    def part(shift: int) -> Any:
        return _small_floats(builder, _bits(builder, words, shift, 4), 4, 1, 1)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


def _int4_lines(builder: Any, chunk: Any, offsets: Any) -> list[Line]:
    words = _load(builder, chunk, _INTS)

    def part(shift: int) -> Any:
        moved = builder.add(_bits(builder, words, shift, 4), offsets)
        return builder.sitofp(builder.sub(moved, _splat(_INTS, LARGEST_OFFSET)), _FLOATS)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


_LINES_OF: dict[CodeName, Callable[[Any, Any, Any], list[Line]]] = {
    "int8": _int8_lines,
    "int4": _int4_lines,
    "fp8": _fp8_lines,
    "mxfp4": _mxfp4_lines,
}


# --- codes to lines of pairs of bfloat16, on CPUs that have AMX ---


def _pairs(builder: Any, line: Line) -> Any:
    """Two FP32 vectors that bfloat16 holds exactly, as pairs."""
    even, odd = (builder.bitcast(part, _INTS) for part in line)
    return builder.or_(builder.lshr(even, _splat(_INTS, 16)), odd)


def _int8_pairs(builder: Any, chunk: Any, offsets: Any) -> list[Any]:
    return [_pairs(builder, line) for line in _int8_lines(builder, chunk, offsets)]


def _look_up_words(builder: Any, values: NDArray[np.float32], index: Any) -> Any:
    """bfloat16 bits of the values at the lowest 5 bits of each word."""
    kind = ir.FunctionType(_WORDS, [_WORDS] * 2)
    name = "llvm.x86.avx512.permvar.hi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(permute, [ir.Constant(_WORDS, _bfloat16_bits(values)), index])


_MXFP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_MXFP4_TABLE = np.tile(
    np.concatenate([_MXFP4_VALUES, -_MXFP4_VALUES]), 2
)  # the fifth bit is another's
_INT4_TABLE = np.arange(-LARGEST_OFFSET, 32 - LARGEST_OFFSET).astype(np.float32)


def _nibbles(builder: Any, chunk: Any) -> list[Any]:
    words = _load(builder, chunk, _WORDS)
    shifts = [_splat(_WORDS, 4 * j) for j in range(4)]
    return [words, *(builder.lshr(words, shift) for shift in shifts[1:])]


def _mxfp4_pairs(builder: Any, chunk: Any, _offsets: Any) -> list[Any]:
    return [_look_up_words(builder, _MXFP4_TABLE, index) for index in _nibbles(builder, chunk)]


def _int4_pairs(builder: Any, chunk: Any, offsets: Any) -> list[Any]:
    both = builder.mul(offsets, _splat(_INTS, 0x10001))
    both = builder.bitcast(both, _WORDS)
    low = _splat(_WORDS, 15)
    moved = [builder.add(builder.and_(w, low), both) for w in _nibbles(builder, chunk)]
    return [_look_up_words(builder, _INT4_TABLE, index) for index in moved]


def _fp8_pairs(builder: Any, chunk: Any, _offsets: Any) -> list[Any]:
    """High and low bytes of the magnitude by table, the sign as it is."""
    codes = _load(builder, chunk, _BYTES)
    bits = np.array(_bfloat16_bits(_e4m3_magnitudes()))
    high = _look_up_bytes(builder, bits >> 8, codes)
    high = builder.or_(high, builder.and_(codes, _splat(_BYTES, 0x80)))
    high, low = (
        builder.bitcast(part, _WORDS) for part in (high, _look_up_bytes(builder, bits, codes))
    )
    first = builder.or_(
        builder.shl(high, _splat(_WORDS, 8)), builder.and_(low, _splat(_WORDS, 0xFF))
    )
    second = builder.or_(
        builder.and_(high, _splat(_WORDS, 0xFF00)), builder.lshr(low, _splat(_WORDS, 8))
    )
    return [first, second]


def _look_up_bytes(builder: Any, table: NDArray[np.int64], index: Any) -> Any:
    """Lowest bytes of the 128 entries at the lowest 7 bits of each byte."""
    kind = ir.FunctionType(_BYTES, [_BYTES] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    halves = [ir.Constant(_BYTES, [int(v) & 0xFF for v in table[i : i + 64]]) for i in (0, 64)]
    return builder.call(permute, [halves[0], index, halves[1]])


def _e4m3_magnitudes() -> NDArray[np.float32]:
    """Values of codes 0 to 127; 127, which is NaN, never occurs in weights."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


_PAIRS_OF: dict[CodeName, Callable[[Any, Any, Any], list[Any]]] = {
    "int8": _int8_pairs,
    "int4": _int4_pairs,
    "fp8": _fp8_pairs,
    "mxfp4": _mxfp4_pairs,
}


# --- whole steps ---


def _decode_typing(_context: Any, panels: Any, _1: Any, _2: Any, _3: Any, scratch: Any) -> Any:
    codes, tiles = cast("tuple[CodeName, bool]", codes_of(panels.dtype))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        group = _address(context, builder, kinds[0], args[0], args[1])
        source = _address(context, builder, kinds[0], args[0], args[2])
        target = _address(context, builder, kinds[4], args[4], _I64(0))
        offsets = _offset_vectors(builder, codes, group)
        with cgutils.for_range(builder, args[3]) as loop:
            step_bytes = _LINES * 4 * CODE_BITS[codes]
            step = builder.gep(source, [builder.mul(loop.index, _I64(step_bytes))])
            size = STEP * _PANEL * (2 if tiles else 4)
            out = builder.gep(target, [builder.mul(loop.index, _I64(size))])
            for tile in range(_LINES // _PAIRS):
                emit = _emit_tile if tiles else _emit_chains
                emit(builder, codes, tile, step, offsets[tile], out)
        return context.get_dummy_value()

    at = types.intp
    return types.void(panels, at, at, at, scratch), codegen


def _offset_vectors(builder: Any, codes: CodeName, group: Any) -> list[Any]:
    """Offsets of the columns of each tile, in all lanes."""
    if codes != "int4":
        return [None] * (_LINES // _PAIRS)
    bytes_16 = ir.VectorType(_I8, _LANES)
    places = [_at(builder, group, SCALE_BYTES + _LANES * t) for t in range(_LINES // _PAIRS)]
    return [builder.zext(_load(builder, place, bytes_16), _INTS) for place in places]


def _chunks(codes: CodeName) -> tuple[int, int]:
    """Lines of a chunk, and chunks of a tile."""
    lines = 16 // CODE_BITS[codes]
    return lines, _PAIRS // lines


def _emit_tile(builder: Any, codes: CodeName, tile: int, step: Any, offsets: Any, out: Any) -> None:
    """A tile of B: 16 lines, one below the other."""
    lines, chunks = _chunks(codes)
    first = builder.gep(step, [_I64(tile * chunks * _CHUNK_BYTES)])
    target = builder.gep(out, [_I64(tile * _PAIRS * _LINE_BYTES)])
    with cgutils.for_range(builder, _I64(chunks)) as loop:
        chunk = builder.gep(first, [builder.mul(loop.index, _I64(_CHUNK_BYTES))])
        place = builder.gep(target, [builder.mul(loop.index, _I64(lines * _LINE_BYTES))])
        _prefetch(builder, chunk)
        for j, line in enumerate(_PAIRS_OF[codes](builder, chunk, offsets)):
            _store(builder, line, _at(builder, place, j * _LINE_BYTES))


def _emit_chains(
    builder: Any, codes: CodeName, tile: int, step: Any, offsets: Any, out: Any
) -> None:
    """16 columns of rows of FP32, one row a feature."""
    lines, chunks = _chunks(codes)
    row_bytes = 4 * _PANEL
    first = builder.gep(step, [_I64(tile * chunks * _CHUNK_BYTES)])
    target = builder.gep(out, [_I64(tile * _LINE_BYTES)])
    with cgutils.for_range(builder, _I64(chunks)) as loop:
        chunk = builder.gep(first, [builder.mul(loop.index, _I64(_CHUNK_BYTES))])
        place = builder.gep(target, [builder.mul(loop.index, _I64(2 * lines * row_bytes))])
        for j, line in enumerate(_LINES_OF[codes](builder, chunk, offsets)):
            for parity, part in enumerate(line):
                _store(builder, part, _at(builder, place, (2 * j + parity) * row_bytes))


decode = cast(Callable[..., None], intrinsic(_decode_typing))
"""`decode(panels, group_at, codes_at, steps, scratch)`: steps of codes as `multiply` takes weights.

In tiles, pairs of bfloat16 as in `cpu.amx`; else [32 steps, 64] FP32.
"""


def _add_typing(
    _context: Any, panels: Any, _1: Any, partial: Any, _3: Any, acc: Any, _5: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        group = _address(context, builder, kinds[0], args[0], args[1])
        source = _address(context, builder, kinds[2], args[2], _I64(0))
        offset = builder.mul(args[5], _I64(4))
        target = _address(context, builder, kinds[4], args[4], offset)
        vectors = range(0, 4 * _PANEL, _LINE_BYTES)
        scales = [_load(builder, _at(builder, group, at), _FLOATS) for at in vectors]
        fma_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, "llvm.fma.v16f32")
        with cgutils.for_range(builder, args[3]) as loop:
            row = builder.mul(loop.index, _I64(4 * _PANEL))
            for at, scale in zip(vectors, scales, strict=True):
                place = _at(builder, builder.gep(target, [row]), at)
                term = _load(builder, _at(builder, builder.gep(source, [row]), at), _FLOATS)
                total = builder.call(fma, [term, scale, _load(builder, place, _FLOATS)])
                _store(builder, total, place)
        return context.get_dummy_value()

    at = types.intp
    return types.void(panels, at, partial, at, acc, at), codegen


add_scaled = cast(Callable[..., None], intrinsic(_add_typing))
"""`add_scaled(panels, group_at, partial, rows, acc, acc_at)`: partial sums times their scales.

acc[acc_at + 64 r + c] = fma(partial[64 r + c], scale[c], acc[...]) for r < rows, c < 64.
"""


def _header_typing(_context: Any, panels: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], _I64(0))
        return builder.load(builder.bitcast(place, _I64.as_pointer()), align=1)

    return types.intp(panels), codegen


stored_group = cast(Callable[..., int], intrinsic(_header_typing))
"""Features that share a scale as the header says, 0 for all."""
