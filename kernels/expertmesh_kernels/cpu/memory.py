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

from expertmesh_kernels.cpu.jit import intrinsic, njit

types: Any = untyped_types
cgutils: Any = untyped_cgutils

_ADDRESS = ir.IntType(8).as_pointer()
_LINE = 64  # bytes of a cache line


def _pointer_typing(_context: Any, _address: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


def _copy_typing(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(data, [data, data, args[2].type])
        copy = cgutils.get_or_insert_function(builder.module, kind, "memmove")
        builder.call(copy, [*(builder.inttoptr(address, data) for address in args[:2]), args[2]])
        return args[2]

    return types.int64(types.int64, types.int64, types.int64), codegen


def _prefetch_typing(_context: Any, array: Any, _at: Any, _count: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), _ADDRESS)
        size = builder.mul(args[2], args[2].type(context.get_abi_sizeof(data.type.pointee)))
        lines = builder.udiv(builder.add(size, size.type(_LINE - 1)), size.type(_LINE))
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS] + [ir.IntType(32)] * 3)
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.IntType(32)(flag) for flag in (0, 2, 1)]  # for reading, into L2, data
        with cgutils.for_range(builder, lines) as loop:
            line = builder.gep(address, [builder.mul(loop.index, loop.index.type(_LINE))])
            builder.call(prefetch, [line, *flags])
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
