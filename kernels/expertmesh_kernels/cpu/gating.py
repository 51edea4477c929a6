"""SiLU of a panel's sums, 16 at a time, on the way to the rows of the next product.

The same IEEE operations as `expertmesh_kernels.cpu.activation`, so the same bits; written out in
vectors, since compiled loops over rows this short spend their time on set-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.primitives import (
    EXP_POLYNOMIAL,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ROUND,
    ROUND_BITS,
    narrow_ir,
)
from expertmesh_kernels.cpu.tile import HALF_PANEL, PANEL
from expertmesh_kernels.cpu.vectors import (
    FLOATS,
    I64,
    INTS,
    LANES,
    element_at,
    floats,
    fma,
    ints,
    load,
    store,
)

cgutils: Any = untyped_cgutils


def _power_of_two(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    bits = builder.shl(builder.add(exponent, ints(127)), ints(23))
    return builder.bitcast(bits, FLOATS)


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """`primitives.exp` of 16."""
    x = builder.select(builder.fcmp_ordered("<", x, floats(-104.0)), floats(-104.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, floats(89.0)), floats(89.0), x)
    shifted = fma(builder, x, floats(LOG2_E), floats(ROUND))
    whole = builder.fsub(shifted, floats(ROUND))
    r = fma(builder, whole, floats(LN2_HIGH), x)
    r = fma(builder, whole, floats(LN2_LOW), r)
    p = floats(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = fma(builder, p, r, floats(coefficient))
    p = builder.fadd(fma(builder, p, builder.fmul(r, r), r), floats(1.0))
    exponent = builder.sub(builder.bitcast(shifted, INTS), ints(int(ROUND_BITS)))
    half = builder.ashr(exponent, ints(1))
    p = builder.fmul(p, _power_of_two(builder, half))
    return builder.fmul(p, _power_of_two(builder, builder.sub(exponent, half)))


def _silu_typing(_context: Any, acc: Any, _1: Any, target: Any, _3: Any, _4: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source = element_at(context, builder, acc, args[0], I64(0))
        place = element_at(context, builder, target, args[2], args[3])
        with cgutils.for_range(builder, args[1]) as loop:
            row = builder.gep(source, [builder.mul(loop.index, I64(PANEL))])
            out = builder.gep(place, [builder.mul(loop.index, args[4])])
            for column in range(0, HALF_PANEL, LANES):
                gate, up = (
                    load(builder, builder.gep(row, [I64(at)]), FLOATS, align=4)
                    for at in (column, HALF_PANEL + column)
                )
                power = _exp(builder, builder.fneg(gate))
                value = builder.fmul(builder.fdiv(gate, builder.fadd(floats(1.0), power)), up)
                value = narrow_ir(builder, value, target.dtype)
                store(builder, value, builder.gep(out, [I64(column)]), align=2)
        return context.get_dummy_value()

    at = types.intp
    return types.void(acc, at, target, at, at), codegen


silu_rows = cast(Callable[..., None], intrinsic(_silu_typing))
"""`silu_rows(acc, rows, target, at, stride)`: target[at + stride r + c] = silu(gate) * up, rounded.

acc is flat [rows, 64] of FP32: 32 columns of the gate, then as many of up; c < 32.
"""
