"""One row of the softmax for AMX: scores to weights in bfloat16, 16 at a time.

Written out in vectors, since compiled loops over rows this short spend their time on set-up.
Weights are 2 ** ((score - top) / ln 2) within 2**-17, far below the rounding to bfloat16, by a
polynomial of degree 5; at least 2**-126, so that one shift makes the exponent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.primitives import ROUND
from expertmesh_kernels.cpu.vectors import (
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    element_at,
    everywhere,
    floats,
    fma,
    ints,
)

cgutils: Any = untyped_cgutils

_HALVES = ir.VectorType(I16, LANES)

_LOG2_E = 1.44269504088896341
_LOWEST = -126.0
_POLYNOMIAL = (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


class _Row:
    """Scores of one row in blocks of 16, -inf where the row does not see the key."""

    def __init__(self, builder: ir.IRBuilder, scores: Any, low: Any, high: Any) -> None:
        self._scores = scores
        self._low = everywhere(builder, builder.trunc(low, I32))
        self._high = everywhere(builder, builder.trunc(high, I32))

    def load(self, builder: ir.IRBuilder, block: Any) -> tuple[Any, Any]:
        """Scores, and which of them count."""
        first = builder.mul(block, block.type(LANES))
        lanes = ir.Constant(INTS, list(range(LANES)))
        index = builder.add(everywhere(builder, builder.trunc(first, I32)), lanes)
        is_seen = builder.and_(
            builder.icmp_signed(">=", index, self._low), builder.icmp_signed("<", index, self._high)
        )
        place = builder.bitcast(builder.gep(self._scores, [first]), FLOATS.as_pointer())
        return builder.load(place, align=4), is_seen


def _reduce(builder: ir.IRBuilder, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lane l with l + 8, then + 4, + 2, + 1."""
    for step in (8, 4, 2, 1):
        mask = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, I32(0))


def _emit_top(builder: ir.IRBuilder, row: _Row, blocks: Any) -> Any:
    """The largest score that is not NaN."""

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", y, x), y, x)

    slot = cgutils.alloca_once_value(builder, floats(float("-inf")))
    with cgutils.for_range(builder, blocks) as loop:
        scores, is_seen = row.load(builder, loop.index)
        seen = builder.select(is_seen, scores, floats(float("-inf")))
        builder.store(larger(builder.load(slot), seen), slot)
    return _reduce(builder, builder.load(slot), larger)


def _emit_power(builder: ir.IRBuilder, scores: Any, top: Any) -> tuple[Any, Any]:
    """Bits of the weights in bfloat16, in the low halves; and what is NaN where a score is."""
    x = builder.fmul(builder.fsub(scores, top), floats(_LOG2_E))
    x = builder.select(builder.fcmp_ordered("<", x, floats(_LOWEST)), floats(_LOWEST), x)
    shifted = builder.fadd(x, floats(ROUND))
    rest = builder.fsub(x, builder.fsub(shifted, floats(ROUND)))
    power = floats(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power = fma(builder, power, rest, floats(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, INTS), ints(23))
    bits = builder.add(builder.bitcast(power, INTS), exponent)
    is_odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(builder.add(bits, ints(0x7FFF)), is_odd)
    return builder.lshr(rounded, ints(16)), rest


def _soften_typing(
    _context: Any, scores: Any, _1: Any, _2: Any, _3: Any, _4: Any, weights: Any, _6: Any
) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source = element_at(context, builder, signature.args[0], args[0], args[1])
        target = element_at(context, builder, signature.args[5], args[5], args[6])
        blocks = builder.udiv(builder.add(args[4], I64(LANES - 1)), I64(LANES))
        row = _Row(builder, source, args[2], args[3])
        top = _emit_top(builder, row, blocks)
        total = _emit_weights(builder, row, blocks, everywhere(builder, top), target)
        return context.make_tuple(builder, signature.return_type, (top, total))

    at = types.intp
    result = types.Tuple((types.float32, types.float32))  # type: ignore[no-untyped-call]
    return result(scores, at, at, at, at, weights, at), codegen


def _emit_weights(builder: ir.IRBuilder, row: _Row, blocks: Any, top: Any, target: Any) -> Any:
    """Stores the weights; returns their sum, in 16 chains added pairwise."""
    slot = cgutils.alloca_once_value(builder, floats(0.0))
    with cgutils.for_range(builder, blocks) as loop:
        scores, is_seen = row.load(builder, loop.index)
        halves, rest = _emit_power(builder, scores, top)
        halves = builder.select(is_seen, halves, ints(0))
        place = builder.gep(target, [builder.mul(loop.index, loop.index.type(LANES))])
        place = builder.bitcast(place, _HALVES.as_pointer())
        builder.store(builder.trunc(halves, _HALVES), place, align=2)
        weights = builder.bitcast(builder.shl(halves, ints(16)), FLOATS)
        weights = fma(builder, rest, floats(0.0), weights)  # NaN if the score is
        seen = builder.select(is_seen, weights, floats(0.0))
        builder.store(builder.fadd(builder.load(slot), seen), slot)
    return _reduce(builder, builder.load(slot), builder.fadd)


soften = cast(Callable[..., Any], intrinsic(_soften_typing))
"""`soften(scores, at, low, high, count, weights, weights_at)`: the top score, and the weights' sum.

scores (float32) and weights (bfloat16 as uint16) are flat; of the row that starts at `at` the
scores low .. high count. Weights 0 .. count are written, up to a multiple of 16; those that do not
count are 0. If none does, top is -inf and the sum 0.
"""
