"""What compiled kernels are written in where loops will not do: vectors of 16, in LLVM's terms.

Values are those of an instruction builder; `context` and types of arrays are Numba's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils

cgutils: Any = untyped_cgutils

LANES = 16
LINE_BYTES = 64
"""Of a cache line."""
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
ADDRESS = I8.as_pointer()

TO_L1, TO_L2 = 3, 2
"""Where `prefetch` brings a line."""


def splat(kind: ir.VectorType, number: float) -> ir.Constant:
    """A number in all lanes."""
    return ir.Constant(kind, [number] * kind.count)


def floats(number: float | np.floating[Any]) -> ir.Constant:
    """An FP32 number in all lanes."""
    return splat(FLOATS, float(number))


def ints(number: int) -> ir.Constant:
    """A 32-bit number in all lanes."""
    return splat(INTS, number)


def everywhere(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A scalar in all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ints(0))


def fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z of vectors of FP32, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


def element_at(
    context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, at: ir.Value
) -> ir.Value:
    """Address of element `at` of a contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


def byte_at(builder: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    """Address of a byte, `offset` after another."""
    return builder.gep(address, [I64(offset)])


def load(
    builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType, *, align: int = 1
) -> ir.Value:
    """A vector from memory of any type."""
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, *, align: int = 4) -> None:
    """A vector to memory of any type."""
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=align)


def prefetch(builder: ir.IRBuilder, address: ir.Value, where: int = TO_L1) -> None:
    """Ask for the line of a byte, to be read; any address is harmless."""
    kind = ir.FunctionType(ir.VoidType(), [ADDRESS] + [I32] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, *(I32(flag) for flag in (0, where, 1))])  # read, of data
