"""A chunk of codes, 64 bytes, as vectors of what the codes stand for.

A line is one pair of features in 16 columns; a chunk has

    int8   2 lines: 16 bytes of the even features, 16 of the odd ones, two's complement
    fp8    2 lines: bytes 0 and 2 of each dword, bytes 1 and 3; E4M3
    int4   4 lines: nibble j of the words of each dword, of 0 to 15
    mxfp4  4 lines: likewise; E2M1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numpy.typing import NDArray

from expertmesh.formats.coded import CodeName
from expertmesh_kernels.cpu.vectors import (
    ADDRESS,
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    byte_at,
    element_at,
    floats,
    ints,
    load,
    splat,
)

cgutils: Any = untyped_cgutils

LARGEST_OFFSET = 15
"""Less a zero point of 0 to 15, so that code plus offset is 0 to 30."""

_BYTES = ir.VectorType(I8, 64)
_WORDS = ir.VectorType(I16, 32)


def byte_address(
    context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, offset: ir.Value
) -> ir.Value:
    """Address of the byte `offset` of an array."""
    data = element_at(context, builder, kind, array, I64(0))
    return builder.gep(builder.bitcast(data, ADDRESS), [offset])


def _bfloat16_bits(values: NDArray[np.float32]) -> list[int]:
    return [int(bits) for bits in values.view(np.uint32) >> 16]


# --- codes to FP32, on any CPU: for each line the even features and the odd ones ---

Line = tuple[ir.Value, ir.Value]


def _bits(builder: ir.IRBuilder, words: ir.Value, shift: int, count: int) -> ir.Value:
    shifted = builder.lshr(words, ints(shift)) if shift else words
    return builder.and_(shifted, ints((1 << count) - 1))


def _int8_lines(builder: ir.IRBuilder, chunk: ir.Value, _offsets: ir.Value) -> list[Line]:
    def part(index: int) -> ir.Value:
        stored = load(builder, byte_at(builder, chunk, LANES * index), ir.VectorType(I8, LANES))
        return builder.sitofp(builder.sext(stored, INTS), FLOATS)

    return [(part(0), part(1)), (part(2), part(3))]


def _small_floats(
    builder: ir.IRBuilder, codes: ir.Value, bits: int, mantissa: int, bias: int
) -> ir.Value:
    """Codes of sign, exponent and mantissa, subnormal ones too, as FP32."""
    magnitude = builder.and_(codes, ints((1 << bits - 1) - 1))
    sign = builder.and_(codes, ints(1 << bits - 1))
    magnitude = builder.shl(magnitude, ints(23 - mantissa))
    magnitude = builder.bitcast(magnitude, FLOATS)
    scale = floats(2.0 ** (127 - bias))
    value = builder.bitcast(builder.fmul(magnitude, scale), INTS)
    sign = builder.shl(sign, ints(32 - bits))
    return builder.bitcast(builder.or_(value, sign), FLOATS)


def _fp8_lines(builder: ir.IRBuilder, chunk: ir.Value, _offsets: ir.Value) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> ir.Value:
        return _small_floats(builder, _bits(builder, words, shift, 8), 8, 3, 7)

    return [(part(0), part(16)), (part(8), part(24))]


def _mxfp4_lines(builder: ir.IRBuilder, chunk: ir.Value, _offsets: ir.Value) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> ir.Value:
        return _small_floats(builder, _bits(builder, words, shift, 4), 4, 1, 1)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


def _int4_lines(builder: ir.IRBuilder, chunk: ir.Value, offsets: ir.Value) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> ir.Value:
        moved = builder.add(_bits(builder, words, shift, 4), offsets)
        return builder.sitofp(builder.sub(moved, ints(LARGEST_OFFSET)), FLOATS)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


LINES_OF: dict[CodeName, Callable[[ir.IRBuilder, ir.Value, ir.Value], list[Line]]] = {
    "int8": _int8_lines,
    "int4": _int4_lines,
    "fp8": _fp8_lines,
    "mxfp4": _mxfp4_lines,
}


# --- codes to lines of pairs of bfloat16, on CPUs that have AMX ---


def _pairs(builder: ir.IRBuilder, line: Line) -> ir.Value:
    """Two FP32 vectors that bfloat16 holds exactly, as pairs."""
    even, odd = (builder.bitcast(part, INTS) for part in line)
    return builder.or_(builder.lshr(even, ints(16)), odd)


def _int8_pairs(builder: ir.IRBuilder, chunk: ir.Value, offsets: ir.Value) -> list[ir.Value]:
    return [_pairs(builder, line) for line in _int8_lines(builder, chunk, offsets)]


def _look_up_words(builder: ir.IRBuilder, values: NDArray[np.float32], index: ir.Value) -> ir.Value:
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


def _nibbles(builder: ir.IRBuilder, chunk: ir.Value) -> list[ir.Value]:
    words = load(builder, chunk, _WORDS)
    shifts = [splat(_WORDS, 4 * j) for j in range(4)]
    return [words, *(builder.lshr(words, shift) for shift in shifts[1:])]


def _mxfp4_pairs(builder: ir.IRBuilder, chunk: ir.Value, _offsets: ir.Value) -> list[ir.Value]:
    return [_look_up_words(builder, _MXFP4_TABLE, index) for index in _nibbles(builder, chunk)]


def _int4_pairs(builder: ir.IRBuilder, chunk: ir.Value, offsets: ir.Value) -> list[ir.Value]:
    both = builder.mul(offsets, ints(0x10001))
    both = builder.bitcast(both, _WORDS)
    low = splat(_WORDS, 15)
    moved = [builder.add(builder.and_(w, low), both) for w in _nibbles(builder, chunk)]
    return [_look_up_words(builder, _INT4_TABLE, index) for index in moved]


def _fp8_pairs(builder: ir.IRBuilder, chunk: ir.Value, _offsets: ir.Value) -> list[ir.Value]:
    """High and low bytes of the magnitude by table, the sign as it is."""
    codes = load(builder, chunk, _BYTES)
    bits = np.array(_bfloat16_bits(_e4m3_magnitudes()))
    high = _look_up_bytes(builder, bits >> 8, codes)
    high = builder.or_(high, builder.and_(codes, splat(_BYTES, 0x80)))
    high, low = (
        builder.bitcast(part, _WORDS) for part in (high, _look_up_bytes(builder, bits, codes))
    )
    first = builder.or_(builder.shl(high, splat(_WORDS, 8)), builder.and_(low, splat(_WORDS, 0xFF)))
    second = builder.or_(
        builder.and_(high, splat(_WORDS, 0xFF00)), builder.lshr(low, splat(_WORDS, 8))
    )
    return [first, second]


def _look_up_bytes(builder: ir.IRBuilder, table: NDArray[np.int64], index: ir.Value) -> ir.Value:
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


PAIRS_OF: dict[CodeName, Callable[[ir.IRBuilder, ir.Value, ir.Value], list[ir.Value]]] = {
    "int8": _int8_pairs,
    "int4": _int4_pairs,
    "fp8": _fp8_pairs,
    "mxfp4": _mxfp4_pairs,
}
