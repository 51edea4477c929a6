"""Up to 16 rows by quantised weights on AMX tiles, decoded on the way.

A step of codes is decoded while the one before it is multiplied: the two use different parts of a
core, and the loads of codes never pause. Decoded steps take turns in two places of L1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types as untyped_types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu import amx
from expertmesh_kernels.cpu.code_vectors import byte_address
from expertmesh_kernels.cpu.codes import (
    codes_of,
    emit_step,
    offset_vectors,
    step_bytes,
)
from expertmesh_kernels.cpu.jit import intrinsic
from expertmesh_kernels.cpu.vectors import I64

cgutils: Any = untyped_cgutils
types: Any = untyped_types


def _few_typing(
    _context: Any, x: Any, _1: Any, _2: Any, panels: Any, _4: Any, _5: Any, _6: Any, scratch: Any,
    acc: Any,
) -> Any:  # fmt: skip
    found = codes_of(panels.dtype)
    assert found is not None
    codes = found[0]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        def address(index: int, offset: ir.Value) -> ir.Value:
            return byte_address(context, builder, signature.args[index], args[index], offset)

        x_at = address(0, builder.shl(args[1], I64(1)))
        stride = builder.shl(args[2], I64(1))
        group, source = address(3, args[4]), address(3, args[5])
        decoded, target = address(7, I64(0)), address(8, I64(0))
        offsets = offset_vectors(builder, codes, group)

        def decode(step: ir.Value) -> None:
            place = builder.gep(source, [builder.mul(step, I64(step_bytes(codes)))])
            emit_step(builder, codes, True, place, offsets, _turn(builder, decoded, step))

        def multiply(step: ir.Value) -> None:
            rows = builder.gep(x_at, [builder.mul(step, I64(amx.ROW_BYTES))])
            amx.few_rows_step(builder, rows, stride, _turn(builder, decoded, step))

        amx.clear_few_rows(builder)
        decode(I64(0))
        last = builder.sub(args[6], I64(1))
        with cgutils.for_range(builder, last) as loop:
            decode(builder.add(loop.index, I64(1)))
            multiply(loop.index)
        multiply(last)
        amx.store_few_rows(builder, target)
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, at, panels, at, at, at, scratch, acc), codegen


def _turn(builder: ir.IRBuilder, decoded: ir.Value, step: ir.Value) -> ir.Value:
    """Where a step is decoded to."""
    return builder.gep(decoded, [builder.mul(builder.and_(step, I64(1)), I64(amx.STEP_BYTES))])


few_coded = cast(Callable[..., None], intrinsic(_few_typing))
"""`few_coded(x, x_at, x_stride, panels, group_at, codes_at, steps, scratch, acc)`

acc[64 r + c] = sum over k < 32 steps of x[x_at + x_stride r + k] w[k, c] for up to 16 configured
rows, as `amx.few_rows`, with w the codes at `codes_at`, not yet scaled; at least one step. scratch
has room for two decoded steps.
"""
