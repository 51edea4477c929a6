"""Arrays from addresses, so that one call takes the weights of any number of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types as untyped_types
from numba.core import cgutils as untyped_cgutils
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from expertmesh_kernels.cpu import vectors
from expertmesh_kernels.cpu.jit import intrinsic, njit
from expertmesh_kernels.cpu.vectors import LINE_BYTES

types: Any = untyped_types
cgutils: Any = untyped_cgutils


def _pointer_typing(_context: Any, _address: Any, like: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


def _copy_typing(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        data = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(data, [data, data, args[2].type])
        copy = cgutils.get_or_insert_function(builder.module, kind, "memmove")
        builder.call(copy, [*(builder.inttoptr(address, data) for address in args[:2]), args[2]])
        return args[2]

    return types.int64(types.int64, types.int64, types.int64), codegen


def _prefetch_typing(_context: Any, array: Any, _at: Any, _count: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        data = vectors.element_at(context, builder, signature.args[0], args[0], args[1])
        address = builder.bitcast(data, vectors.ADDRESS)
        size = builder.mul(args[2], args[2].type(context.get_abi_sizeof(data.type.pointee)))
        size = builder.add(size, size.type(LINE_BYTES - 1))
        with cgutils.for_range(builder, builder.udiv(size, size.type(LINE_BYTES))) as loop:
            line = builder.mul(loop.index, loop.index.type(LINE_BYTES))
            vectors.prefetch(builder, builder.gep(address, [line]), vectors.TO_L2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


_pointer = cast(Callable[..., Any], intrinsic(_pointer_typing))
copy_bytes = cast(Callable[[int, int, int], int], intrinsic(_copy_typing))
"""(target, source, count): copies memory, which may overlap and need not be aligned."""


prefetch = cast(Callable[[NDArray[Any], int, int], None], intrinsic(_prefetch_typing))
"""(array, at, count): asks for the elements at .. at + count, which then come into L2."""


@njit
def array_at(address: int, size: int, like: NDArray[Any]) -> NDArray[Any]:
    """The memory at an address as a flat array of the element type of `like`.

    The owner of the memory keeps it alive; address 0 goes with size 0.
    """
    found: NDArray[Any] = carray(_pointer(address, like), (size,))
    return found


@njit
def address_of(array: NDArray[np.generic]) -> int:
    """Where an array's memory begins; signed, as kernels that take addresses are compiled for."""
    return int(np.int64(array.ctypes.data))


FLOATS = np.empty(0, np.float32)
"""For `like`."""


@njit
def optional_floats(address: int, size: int) -> NDArray[np.float32]:
    """The FP32 numbers at an address; none if that is 0."""
    return array_at(address, size if address != 0 else 0, FLOATS)
