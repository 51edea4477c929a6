"""Adjacent rows interleaved as pairs of bfloat16, the right-hand side of an AMX product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.vectors import I16, I32, LANES, element_at, load, store

cgutils: Any = untyped_cgutils

_HALVES = ir.VectorType(I16, LANES)
_MASK = ir.VectorType(I32, 2 * LANES)


def _pair_typing(_context: Any, stored: Any, _1: Any, _2: Any, _3: Any, pairs: Any, _5: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        stored_type, pairs_type = signature.args[0], signature.args[4]
        source = element_at(context, builder, stored_type, args[0], args[1])
        target = element_at(context, builder, pairs_type, args[4], args[5])
        mask = ir.Constant(_MASK, [half * LANES + i for i in range(LANES) for half in (0, 1)])
        with cgutils.for_range(builder, args[3]) as loop:
            row = builder.gep(
                source, [builder.mul(loop.index, builder.shl(args[2], args[2].type(1)))]
            )
            low = load(builder, row, _HALVES, align=2)
            high = load(builder, builder.gep(row, [args[2]]), _HALVES, align=2)
            place = builder.gep(target, [builder.mul(loop.index, loop.index.type(LANES))])
            both = builder.shuffle_vector(low, high, mask)
            store(builder, both, place)
        return context.get_dummy_value()

    at = types.intp
    return types.void(stored, at, at, at, pairs, at), codegen


pair_strip = cast(Callable[..., None], intrinsic(_pair_typing))
"""`pair_strip(stored, at, stride, num_pairs, pairs, pairs_at)`: 16 columns of pairs of rows.

The low half of pairs[pairs_at + 16 i + c] is stored[at + 2 i stride + c], the high half the element
`stride` later, for i < num_pairs and c < 16.
"""
