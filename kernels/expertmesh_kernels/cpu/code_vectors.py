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

cgutils: Any = untyped_cgutils

LARGEST_OFFSET = 15
"""Less a zero point of 0 to 15, so that code plus offset is 0 to 30."""
LANES = 16
_PREFETCH_BYTES = 4096

I8, _I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTES = ir.VectorType(I8, 64)
_WORDS = ir.VectorType(_I16, 32)
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
ADDRESS = I8.as_pointer()


# --- vectors of constants and memory ---


def splat(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def at_offset(builder: Any, address: Any, offset: int) -> Any:
    return builder.gep(address, [I64(offset)])


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=4)


def byte_address(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """Address of the byte `offset` of an array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, ADDRESS), [offset])


def prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ADDRESS] + [I32] * 3)
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [I32(flag) for flag in (0, 3, 1)]  # for reading, near, data
    builder.call(prefetch, [at_offset(builder, address, _PREFETCH_BYTES), *flags])


def _bfloat16_bits(values: NDArray[np.float32]) -> list[int]:
    return [int(bits) for bits in values.view(np.uint32) >> 16]


# --- codes to FP32, on any CPU: for each line the even features and the odd ones ---

Line = tuple[Any, Any]


def _bits(builder: Any, words: Any, shift: int, count: int) -> Any:
    shifted = builder.lshr(words, splat(INTS, shift)) if shift else words
    return builder.and_(shifted, splat(INTS, (1 << count) - 1))


def _int8_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    def part(index: int) -> Any:
        stored = load(builder, at_offset(builder, chunk, LANES * index), ir.VectorType(I8, LANES))
        return builder.sitofp(builder.sext(stored, INTS), FLOATS)

    return [(part(0), part(1)), (part(2), part(3))]


def _small_floats(builder: Any, codes: Any, bits: int, mantissa: int, bias: int) -> Any:
    """Codes of sign, exponent and mantissa, subnormal ones too, as FP32."""
    magnitude = builder.and_(codes, splat(INTS, (1 << bits - 1) - 1))
    sign = builder.and_(codes, splat(INTS, 1 << bits - 1))
    magnitude = builder.shl(magnitude, splat(INTS, 23 - mantissa))
    magnitude = builder.bitcast(magnitude, FLOATS)
    scale = ir.Constant(FLOATS, [2.0 ** (127 - bias)] * LANES)
    value = builder.bitcast(builder.fmul(magnitude, scale), INTS)
    sign = builder.shl(sign, splat(INTS, 32 - bits))
    return builder.bitcast(builder.or_(value, sign), FLOATS)


def _fp8_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> Any:
        return _small_floats(builder, _bits(builder, words, shift, 8), 8, 3, 7)

    return [(part(0), part(16)), (part(8), part(24))]


def _mxfp4_lines(builder: Any, chunk: Any, _offsets: Any) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> Any:
        return _small_floats(builder, _bits(builder, words, shift, 4), 4, 1, 1)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


def _int4_lines(builder: Any, chunk: Any, offsets: Any) -> list[Line]:
    words = load(builder, chunk, INTS)

    def part(shift: int) -> Any:
        moved = builder.add(_bits(builder, words, shift, 4), offsets)
        return builder.sitofp(builder.sub(moved, splat(INTS, LARGEST_OFFSET)), FLOATS)

    return [(part(shift), part(16 + shift)) for shift in (0, 4, 8, 12)]


LINES_OF: dict[CodeName, Callable[[Any, Any, Any], list[Line]]] = {
    "int8": _int8_lines,
    "int4": _int4_lines,
    "fp8": _fp8_lines,
    "mxfp4": _mxfp4_lines,
}


# --- codes to lines of pairs of bfloat16, on CPUs that have AMX ---


def _pairs(builder: Any, line: Line) -> Any:
    """Two FP32 vectors that bfloat16 holds exactly, as pairs."""
    even, odd = (builder.bitcast(part, INTS) for part in line)
    return builder.or_(builder.lshr(even, splat(INTS, 16)), odd)


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
    words = load(builder, chunk, _WORDS)
    shifts = [splat(_WORDS, 4 * j) for j in range(4)]
    return [words, *(builder.lshr(words, shift) for shift in shifts[1:])]


def _mxfp4_pairs(builder: Any, chunk: Any, _offsets: Any) -> list[Any]:
    return [_look_up_words(builder, _MXFP4_TABLE, index) for index in _nibbles(builder, chunk)]


def _int4_pairs(builder: Any, chunk: Any, offsets: Any) -> list[Any]:
    both = builder.mul(offsets, splat(INTS, 0x10001))
    both = builder.bitcast(both, _WORDS)
    low = splat(_WORDS, 15)
    moved = [builder.add(builder.and_(w, low), both) for w in _nibbles(builder, chunk)]
    return [_look_up_words(builder, _INT4_TABLE, index) for index in moved]


def _fp8_pairs(builder: Any, chunk: Any, _offsets: Any) -> list[Any]:
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


PAIRS_OF: dict[CodeName, Callable[[Any, Any, Any], list[Any]]] = {
    "int8": _int8_pairs,
    "int4": _int4_pairs,
    "fp8": _fp8_pairs,
    "mxfp4": _mxfp4_pairs,
}
