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

cgutils: Any = untyped_cgutils

_LANES = 16
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_F32, _LANES)
_INTS = ir.VectorType(_I32, _LANES)
_HALVES = ir.VectorType(ir.IntType(16), _LANES)

_LOG2_E = 1.44269504088896341
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_LOWEST = -126.0
_POLYNOMIAL = (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * _LANES)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * _LANES)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _ints(0))


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")
    return builder.call(fma, [x, y, z])


def _at(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


class _Row:
    """Scores of one row in blocks of 16, -inf where the row does not see the key."""

    def __init__(self, builder: Any, scores: Any, low: Any, high: Any) -> None:
        self._scores = scores
        self._low = _splat(builder, builder.trunc(low, _I32), _INTS)
        self._high = _splat(builder, builder.trunc(high, _I32), _INTS)

    def load(self, builder: Any, block: Any) -> tuple[Any, Any]:
        """Scores, and which of them count."""
        first = builder.mul(block, block.type(_LANES))
        lanes = ir.Constant(_INTS, list(range(_LANES)))
        index = builder.add(_splat(builder, builder.trunc(first, _I32), _INTS), lanes)
        is_seen = builder.and_(
            builder.icmp_signed(">=", index, self._low), builder.icmp_signed("<", index, self._high)
        )
        place = builder.bitcast(builder.gep(self._scores, [first]), _FLOATS.as_pointer())
        return builder.load(place, align=4), is_seen


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lane l with l + 8, then + 4, + 2, + 1."""
    for step in (8, 4, 2, 1):
        mask = ir.Constant(_INTS, [(lane + step) % _LANES for lane in range(_LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, _I32(0))


def _emit_top(builder: Any, row: _Row, blocks: Any) -> Any:
    """The largest score that is not NaN."""

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", y, x), y, x)

    slot = cgutils.alloca_once_value(builder, _floats(float("-inf")))
    with cgutils.for_range(builder, blocks) as loop:
        scores, is_seen = row.load(builder, loop.index)
        seen = builder.select(is_seen, scores, _floats(float("-inf")))
        builder.store(larger(builder.load(slot), seen), slot)
    return _reduce(builder, builder.load(slot), larger)


def _emit_power(builder: Any, scores: Any, top: Any) -> tuple[Any, Any]:
    """Bits of the weights in bfloat16, in the low halves; and what is NaN where a score is."""
    x = builder.fmul(builder.fsub(scores, top), _floats(_LOG2_E))
    x = builder.select(builder.fcmp_ordered("<", x, _floats(_LOWEST)), _floats(_LOWEST), x)
    shifted = builder.fadd(x, _floats(_ROUND))
    rest = builder.fsub(x, builder.fsub(shifted, _floats(_ROUND)))
    power = _floats(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power = _fma(builder, power, rest, _floats(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), _ints(23))
    bits = builder.add(builder.bitcast(power, _INTS), exponent)
    is_odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    rounded = builder.add(builder.add(bits, _ints(0x7FFF)), is_odd)
    return builder.lshr(rounded, _ints(16)), rest


def _soften_typing(
    _context: Any, scores: Any, _1: Any, _2: Any, _3: Any, _4: Any, weights: Any, _6: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _at(context, builder, signature.args[0], args[0], args[1])
        target = _at(context, builder, signature.args[5], args[5], args[6])
        blocks = builder.udiv(builder.add(args[4], _I64(_LANES - 1)), _I64(_LANES))
        row = _Row(builder, source, args[2], args[3])
        top = _emit_top(builder, row, blocks)
        total = _emit_weights(builder, row, blocks, _splat(builder, top, _FLOATS), target)
        return context.make_tuple(builder, signature.return_type, (top, total))

    at = types.intp
    result = types.Tuple((types.float32, types.float32))  # type: ignore[no-untyped-call]
    return result(scores, at, at, at, at, weights, at), codegen


def _emit_weights(builder: Any, row: _Row, blocks: Any, top: Any, target: Any) -> Any:
    """Stores the weights; returns their sum, in 16 chains added pairwise."""
    slot = cgutils.alloca_once_value(builder, _floats(0.0))
    with cgutils.for_range(builder, blocks) as loop:
        scores, is_seen = row.load(builder, loop.index)
        halves, rest = _emit_power(builder, scores, top)
        halves = builder.select(is_seen, halves, _ints(0))
        place = builder.gep(target, [builder.mul(loop.index, loop.index.type(_LANES))])
        place = builder.bitcast(place, _HALVES.as_pointer())
        builder.store(builder.trunc(halves, _HALVES), place, align=2)
        weights = builder.bitcast(builder.shl(halves, _ints(16)), _FLOATS)
        weights = _fma(builder, rest, _floats(0.0), weights)  # NaN if the score is
        seen = builder.select(is_seen, weights, _floats(0.0))
        builder.store(builder.fadd(builder.load(slot), seen), slot)
    return _reduce(builder, builder.load(slot), builder.fadd)


soften = cast(Callable[..., Any], intrinsic(_soften_typing))
"""`soften(scores, at, low, high, count, weights, weights_at)`: the top score, and the weights' sum.

scores (float32) and weights (bfloat16 as uint16) are flat; of the row that starts at `at` the
scores low .. high count. Weights 0 .. count are written, up to a multiple of 16; those that do not
count are 0. If none does, top is -inf and the sum 0.
"""
