"""Adjacent rows of int8 codes as pairs of bfloat16, the right-hand side of an AMX product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.primitives import round_to_bfloat16
from expertmesh_kernels.cpu.vectors import (
    FLOATS,
    I8,
    LANES,
    element_at,
    everywhere,
    ints,
    load,
    store,
)

cgutils: Any = untyped_cgutils

_CODES = ir.VectorType(I8, LANES)


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

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, scales, target = (
            element_at(context, builder, signature.args[i], args[i], args[i + 1]) for i in (0, 4, 6)
        )
        columns = None if by_row else load(builder, scales, FLOATS, align=4)
        with cgutils.for_range(builder, args[3]) as loop:
            first = builder.shl(loop.index, loop.index.type(1))
            row = builder.gep(source, [builder.mul(first, args[2])])
            halves = []
            for half, codes in enumerate((row, builder.gep(row, [args[2]]))):
                factors = columns
                if factors is None:
                    at = builder.add(first, first.type(half))
                    factors = everywhere(builder, builder.load(builder.gep(scales, [at])))
                halves.append(_decoded(builder, codes, factors))
            low = builder.lshr(halves[0], ints(16))
            pair = builder.or_(low, builder.and_(halves[1], ints(0xFFFF0000)))
            place = builder.gep(target, [builder.mul(loop.index, loop.index.type(LANES))])
            store(builder, pair, place)
        return context.get_dummy_value()

    return cast(Callable[..., None], intrinsic(typing))


def _decoded(builder: ir.IRBuilder, codes: ir.Value, factors: ir.Value) -> ir.Value:
    """Bits of 16 products, rounded to bfloat16 in their upper halves."""
    value = builder.fmul(builder.sitofp(load(builder, codes, _CODES), FLOATS), factors)
    return round_to_bfloat16(builder, value)


pair_codes_by_column = _make(by_row=False)
"""With scales of columns; see `_make`."""
pair_codes_by_row = _make(by_row=True)
"""With scales of rows."""
