"""Adjacent rows of int8 codes as pairs of bfloat16, the right-hand side of an AMX product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic

cgutils: Any = untyped_cgutils

_LANES = 16
_INT32 = ir.IntType(32)
_CODES = ir.VectorType(ir.IntType(8), _LANES)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_BITS = ir.VectorType(_INT32, _LANES)


def _make(*, by_row: bool) -> Callable[..., None]:
    """`strip(codes, at, stride, num_pairs, scales, scales_at, pairs, pairs_at)`: 16 columns.

    The low half of pairs[pairs_at + 16 i + c] is codes[at + 2 i stride + c] times its scale, the
    high half is of the element `stride` later, for i < num_pairs and c < 16. Scales are those of
    columns, scales[scales_at + c], or those of rows, scales[scales_at + 2 i] and the next.
    """

    def typing(
        _context: Any, codes: Any, _1: Any, _2: Any, _3: Any, scales: Any, _5: Any, pairs: Any,
        _7: Any,
    ) -> Any:  # fmt: skip
        at = types.intp
        return types.void(codes, at, at, at, scales, at, pairs, at), codegen

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, scales, target = (
            builder.gep(
                context.make_array(signature.args[i])(context, builder, args[i]).data, [args[i + 1]]
            )
            for i in (0, 4, 6)
        )
        columns = None if by_row else _vector(builder, scales, _FLOATS, 4)
        with cgutils.for_range(builder, args[3]) as loop:
            first = builder.shl(loop.index, loop.index.type(1))
            row = builder.gep(source, [builder.mul(first, args[2])])
            halves = []
            for half, codes in enumerate((row, builder.gep(row, [args[2]]))):
                factors = columns
                if factors is None:
                    at = builder.add(first, first.type(half))
                    factors = _everywhere(builder, builder.load(builder.gep(scales, [at])))
                halves.append(_decoded(builder, codes, factors))
            low = builder.lshr(halves[0], _all(16))
            pair = builder.or_(low, builder.and_(halves[1], _all(0xFFFF0000)))
            place = builder.gep(target, [builder.mul(loop.index, loop.index.type(_LANES))])
            builder.store(pair, builder.bitcast(place, _BITS.as_pointer()), align=4)
        return context.get_dummy_value()

    return cast(Callable[..., None], intrinsic(typing))


def _vector(builder: Any, pointer: Any, kind: Any, alignment: int) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=alignment)


def _all(number: int) -> Any:
    return ir.Constant(_BITS, [number] * _LANES)


def _everywhere(builder: Any, scale: Any) -> Any:
    """A number in all lanes."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, scale, _INT32(0))
    return builder.shuffle_vector(first, undefined, _all(0))


def _decoded(builder: Any, codes: Any, factors: Any) -> Any:
    """Bits of 16 products, rounded to bfloat16 (see `narrow_like`) in their upper halves."""
    value = builder.fmul(builder.sitofp(_vector(builder, codes, _CODES, 1), _FLOATS), factors)
    bits = builder.bitcast(value, _BITS)
    is_odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    rounded = builder.add(bits, builder.add(is_odd, _all(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, _all(0x7FC00000), rounded)


pair_codes_by_column = _make(by_row=False)
"""With scales of columns; see `_make`."""
pair_codes_by_row = _make(by_row=True)
"""With scales of rows."""
