"""Adjacent rows interleaved as pairs of bfloat16, the right-hand side of an AMX product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic

cgutils: Any = untyped_cgutils

_LANES = 16
_HALVES = ir.VectorType(ir.IntType(16), _LANES)
_MASK = ir.VectorType(ir.IntType(32), 2 * _LANES)


def _pair_typing(_context: Any, stored: Any, _1: Any, _2: Any, _3: Any, pairs: Any, _5: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored_type, pairs_type = signature.args[0], signature.args[4]
        source = _at(context, builder, stored_type, args[0], args[1])
        target = _at(context, builder, pairs_type, args[4], args[5])
        mask = ir.Constant(_MASK, [half * _LANES + i for i in range(_LANES) for half in (0, 1)])
        with cgutils.for_range(builder, args[3]) as loop:
            row = builder.gep(
                source, [builder.mul(loop.index, builder.shl(args[2], args[2].type(1)))]
            )
            low = _load_halves(builder, row)
            high = _load_halves(builder, builder.gep(row, [args[2]]))
            place = builder.gep(target, [builder.mul(loop.index, loop.index.type(_LANES))])
            both = builder.shuffle_vector(low, high, mask)
            builder.store(both, builder.bitcast(place, both.type.as_pointer()), align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(stored, at, at, at, pairs, at), codegen


def _at(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """Address of element `at` of a contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


def _load_halves(builder: Any, row: Any) -> Any:
    """16 elements as bits of bfloat16."""
    return builder.load(builder.bitcast(row, _HALVES.as_pointer()), align=2)


pair_strip = cast(Callable[..., None], intrinsic(_pair_typing))
"""`pair_strip(stored, at, stride, num_pairs, pairs, pairs_at)`: 16 columns of pairs of rows.

The low half of pairs[pairs_at + 16 i + c] is stored[at + 2 i stride + c], the high half the element
`stride` later, for i < num_pairs and c < 16.
"""
