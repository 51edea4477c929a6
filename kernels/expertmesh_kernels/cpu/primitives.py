"""Scalar operations that Numba lacks: explicit FMA, bit casts, 16-bit floats, and our exp.

All are branch-free, so loops over them vectorise, and exact or correctly rounded, so vector width
cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types

from expertmesh_kernels.cpu.jit import intrinsic, njit

_FLOAT = ir.FloatType()
_HALF = ir.HalfType()
_INT32 = ir.IntType(32)
_INT16 = ir.IntType(16)


def _fma_typing(_context: Any, x: Any, y: Any, z: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _bits_typing(_context: Any, value: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT32)

    return types.int32(types.float32), codegen


def _from_bits_typing(_context: Any, bits: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


def _bits64_typing(_context: Any, value: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), codegen


def _from_bits64_typing(_context: Any, bits: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


def _widen_typing(_context: Any, stored: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return widen_ir(builder, args[0], stored, _FLOAT)

    return types.float32(stored), codegen


def _narrow_typing(_context: Any, value: Any, like: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return narrow_ir(builder, args[0], like.dtype)

    return like.dtype(types.float32, like), codegen


def narrow_ir(builder: ir.IRBuilder, value: ir.Value, stored: Any) -> ir.Value:
    """Emit rounding of FP32 to nearest, ties to even; NaN as bfloat16 is 0x7fc0, as in PyTorch.

    Args:
        builder: LLVM instruction builder.
        value: Scalar or vector of float32.
        stored: Numba type of one element of the result, as in `widen_ir`.
    """
    if stored == types.float32:
        return value
    words = _like(value, _INT16)
    if stored == types.int16:
        return builder.bitcast(builder.fptrunc(value, _like(value, _HALF)), words)
    bits = round_to_bfloat16(builder, value)
    return builder.trunc(builder.lshr(bits, _all(bits.type, 16)), words)


def round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit the bits of bfloat16 in the upper halves of integers; the lower ones hold anything."""
    kind = _like(value, _INT32)
    bits = builder.bitcast(value, kind)
    is_odd = builder.and_(builder.lshr(bits, _all(kind, 16)), _all(kind, 1))
    rounded = builder.add(bits, builder.add(is_odd, _all(kind, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, _all(kind, 0x7FC00000), rounded)


def _like(value: ir.Value, element: ir.Type) -> ir.Type:
    """A type of as many lanes as a value has."""
    is_vector = isinstance(value.type, ir.VectorType)
    return ir.VectorType(element, value.type.count) if is_vector else element


def _all(kind: ir.Type, number: int) -> ir.Constant:
    """A number, in all lanes if there are several."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def widen_ir(builder: ir.IRBuilder, value: Any, stored: Any, wide: Any) -> Any:
    """Emit the exact conversion of a stored value (or vector) to FP32.

    Args:
        builder: LLVM instruction builder.
        value: Scalar or vector of float32, of uint16 (bfloat16 bits) or of int16 (float16 bits).
        stored: Numba type of one element.
        wide: LLVM type of the result: float, or a vector of them.
    """
    if stored == types.float32:
        return value
    lanes = wide.count if isinstance(wide, ir.VectorType) else 0
    if stored == types.int16:
        half = ir.VectorType(_HALF, lanes) if lanes else _HALF
        return builder.fpext(builder.bitcast(value, half), wide)
    integers = ir.VectorType(_INT32, lanes) if lanes else _INT32
    shift = ir.Constant(integers, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(value, integers), shift), wide)


fma = cast(Callable[..., np.float32], intrinsic(_fma_typing))
"""x * y + z in FP32 with one rounding."""
float_bits = cast(Callable[..., np.int32], intrinsic(_bits_typing))
float_from_bits = cast(Callable[..., np.float32], intrinsic(_from_bits_typing))
_double_bits = cast(Callable[..., np.int64], intrinsic(_bits64_typing))
_double_from_bits = cast(Callable[..., np.float64], intrinsic(_from_bits64_typing))
widen = cast(Callable[..., np.float32], intrinsic(_widen_typing))
"""A stored element (float32, bfloat16 as uint16, float16 as int16) as FP32, exactly."""
narrow_like = cast(Callable[..., Any], intrinsic(_narrow_typing))
"""FP32 rounded to nearest, ties to even, as the element type of an array."""

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(-0.693359375)
LN2_LOW = np.float32(2.12194440e-4)
EXP_POLYNOMIAL = (
    np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1),
)  # fmt: skip
"""Of e ** r = 1 + r + r**2 p(r) for small r, the highest power first."""
_C0, _C1, _C2, _C3, _C4, _C5 = EXP_POLYNOMIAL
ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
ROUND_BITS = np.int32(0x4B400000)


@njit
def exp(x: np.float32) -> np.float32:
    """e ** x in FP32, within 2 ulp; 0 below -104, inf above 89, NaN for NaN.

    The same sequence of IEEE operations everywhere, unlike a libm.
    """
    x = np.float32(-104.0) if x < np.float32(-104.0) else x
    x = np.float32(89.0) if x > np.float32(89.0) else x
    shifted = fma(x, LOG2_E, ROUND)
    whole = shifted - ROUND
    r = fma(whole, LN2_LOW, fma(whole, LN2_HIGH, x))
    p = fma(_C0, r, _C1)
    p = fma(p, r, _C2)
    p = fma(p, r, _C3)
    p = fma(p, r, _C4)
    p = fma(p, r, _C5)
    p = fma(p, r * r, r) + np.float32(1.0)
    exponent = np.int32(float_bits(shifted) - ROUND_BITS)
    half = np.int32(exponent >> np.int32(1))  # in two steps, so that subnormal results round once
    return p * _power_of_two(half) * _power_of_two(np.int32(exponent - half))


@njit
def _power_of_two(exponent: np.int32) -> np.float32:
    return float_from_bits(np.int32((exponent + np.int32(127)) << np.int32(23)))


@njit
def tanh(x: np.float32) -> np.float32:
    """Hyperbolic tangent in FP32, within 3 ulp; +-1 for large x, NaN for NaN.

    An odd polynomial below 5/8, else 1 - 2 / (e ** 2x + 1); both are computed.
    """
    size = abs(x)
    z = x * x
    p = fma(np.float32(-5.70498872745e-3), z, np.float32(2.06390887954e-2))
    p = fma(p, z, np.float32(-5.37397155531e-2))
    p = fma(p, z, np.float32(1.33314422036e-1))
    p = fma(p, z, np.float32(-3.33332819422e-1))
    near = fma(p * z, x, x)
    far = np.float32(1.0) - np.float32(2.0) / (exp(size + size) + np.float32(1.0))
    far = -far if x < 0 else far
    return near if size < np.float32(0.625) else far


_LN2 = 0.6931471805599453
_SQRT2_BITS = 0x3FF6A09E667F3BCD


@njit
def log(x: float) -> float:
    """Natural logarithm in FP64 of a positive normal number, within 4 ulp (relative to 1 near 1).

    log(2**e m) = e log 2 + 2 artanh((m - 1) / (m + 1)) with m in [sqrt 1/2, sqrt 2).
    """
    bits = _double_bits(x)
    exponent = (bits - _SQRT2_BITS + (np.int64(1) << np.int64(52))) >> np.int64(52)
    m = _double_from_bits(bits - (exponent << np.int64(52)))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    return exponent * _LN2 + (2.0 * s + 2.0 * s * z * p)
