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
from expertmesh_kernels.cpu.primitives import EXP_POLYNOMIAL, LN2_HIGH, LN2_LOW, LOG2_E, narrow_ir
from expertmesh_kernels.cpu.tile import HALF_PANEL, PANEL

cgutils: Any = untyped_cgutils

_LANES = 16
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_F32, _LANES)
_INTS = ir.VectorType(_I32, _LANES)
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000


def _floats(value: Any) -> Any:
    return ir.Constant(_FLOATS, [float(value)] * _LANES)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * _LANES)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")
    return builder.call(fma, [x, y, z])


def _power_of_two(builder: Any, exponent: Any) -> Any:
    bits = builder.shl(builder.add(exponent, _ints(127)), _ints(23))
    return builder.bitcast(bits, _FLOATS)


def _exp(builder: Any, x: Any) -> Any:
    """`primitives.exp` of 16."""
    x = builder.select(builder.fcmp_ordered("<", x, _floats(-104.0)), _floats(-104.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, _floats(89.0)), _floats(89.0), x)
    shifted = _fma(builder, x, _floats(LOG2_E), _floats(_ROUND))
    whole = builder.fsub(shifted, _floats(_ROUND))
    r = _fma(builder, whole, _floats(LN2_HIGH), x)
    r = _fma(builder, whole, _floats(LN2_LOW), r)
    p = _floats(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = _fma(builder, p, r, _floats(coefficient))
    p = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), _floats(1.0))
    exponent = builder.sub(builder.bitcast(shifted, _INTS), _ints(_ROUND_BITS))
    half = builder.ashr(exponent, _ints(1))
    p = builder.fmul(p, _power_of_two(builder, half))
    return builder.fmul(p, _power_of_two(builder, builder.sub(exponent, half)))


def _silu_typing(_context: Any, acc: Any, _1: Any, target: Any, _3: Any, _4: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(acc)(context, builder, args[0]).data
        place = context.make_array(target)(context, builder, args[2]).data
        place = builder.gep(place, [args[3]])
        with cgutils.for_range(builder, args[1]) as loop:
            row = builder.gep(source, [builder.mul(loop.index, _I64(PANEL))])
            out = builder.gep(place, [builder.mul(loop.index, args[4])])
            for column in range(0, HALF_PANEL, _LANES):
                gate = _load(builder, row, column)
                up = _load(builder, row, HALF_PANEL + column)
                power = _exp(builder, builder.fneg(gate))
                value = builder.fmul(builder.fdiv(gate, builder.fadd(_floats(1.0), power)), up)
                value = narrow_ir(builder, value, target.dtype)
                at = builder.gep(out, [_I64(column)])
                builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=2)
        return context.get_dummy_value()

    at = types.intp
    return types.void(acc, at, target, at, at), codegen


def _load(builder: Any, row: Any, column: int) -> Any:
    place = builder.bitcast(builder.gep(row, [_I64(column)]), _FLOATS.as_pointer())
    return builder.load(place, align=4)


silu_rows = cast(Callable[..., None], intrinsic(_silu_typing))
"""`silu_rows(acc, rows, target, at, stride)`: target[at + stride r + c] = silu(gate) * up, rounded.

acc is flat [rows, 64] of FP32: 32 columns of the gate, then as many of up; c < 32.
"""
