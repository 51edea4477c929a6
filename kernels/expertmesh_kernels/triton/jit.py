"""Typed doors to Triton's decorator, and small device functions that many kernels use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on the CPU."""
INTERPRETED = tl.constexpr(IS_INTERPRETED)
"""The same, inside kernels."""


def kernel(*dynamic: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel; arguments named here differ from call to call, so none of their values matter.

    Other integers are compiled for being 1 or a multiple of 16, so they must belong to the model.
    """

    def decorate(function: Callable[..., None]) -> Any:
        return triton.jit(function, do_not_specialize=list(dynamic))

    return decorate


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call."""
    return cast(Callable[..., Any], triton.jit(function))


@device
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """acc + a @ b in FP32, each output one chain in ascending k.

    Operands of different types are multiplied in FP32. Triton's interpreter would multiply the
    bits of bfloat16, so there all are.
    """
    if INTERPRETED or a.dtype != b.dtype:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@device
def narrow(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """FP32 rounded to a type, to nearest, ties to even; Triton's interpreter cuts bfloat16 off."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(DTYPE)
    return result


@device
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@device
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent: an odd polynomial below 5/8, else 1 - 2 / (exp(2 |x|) + 1)."""
    size = tl.abs(x)
    z = x * x
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, z, -5.37397155531e-2)
    p = tl.fma(p, z, 1.33314422036e-1)
    p = tl.fma(p, z, -3.33332819422e-1)
    near = tl.fma(p * z, x, x)
    far = 1.0 - 2.0 / (tl.exp(size + size) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(size < 0.625, near, far)


def next_power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(count - 1, 0).bit_length()
