"""Scratch arrays of one call, on the stack of its thread.

An array from NumPy's functions is counted: whoever slices it or passes it on adds to and takes from
one word with locked instructions, and each of them waits for all loads before it. In a kernel that
waits for memory anyway that was a quarter of the time (docs/log.md). An array on the stack has no
owner, so there is nothing to count, nothing to allocate and nothing to free.

It ends with the function whose body makes it: it must not be returned, nor be made in a loop. A
stack has 8 MiB as a rule; what grows with the number of rows belongs on the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types as untyped_types
from numba.np import arrayobj as untyped_arrayobj
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import intrinsic

types: Any = untyped_types
arrayobj: Any = untyped_arrayobj

_ALIGNMENT = 64  # a cache line, and the row of a tile
_I64 = ir.IntType(64)


def stack_array(element: Any, context: Any, builder: ir.IRBuilder, count: Any) -> Any:
    """Emits a flat array of `count` elements, unset, that ends with the function around it."""
    kind = types.Array(element, 1, "C")
    stored = context.get_data_type(element)
    data = builder.alloca(stored, size=count)
    data.align = _ALIGNMENT
    array = arrayobj.make_array(kind)(context, builder)
    item_size = _I64(context.get_abi_sizeof(stored))
    arrayobj.populate_array(
        array, data=data, shape=[count], strides=[item_size], itemsize=item_size, meminfo=None
    )
    return array._getvalue()


def _like_typing(_context: Any, _count: Any, like: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return stack_array(like.dtype, context, builder, args[0])

    return types.Array(like.dtype, 1, "C")(types.intp, like), codegen


def _floats_typing(_context: Any, _count: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return stack_array(types.float32, context, builder, args[0])

    return types.Array(types.float32, 1, "C")(types.intp), codegen


scratch_like = cast(Callable[[int, NDArray[Any]], NDArray[Any]], intrinsic(_like_typing))
"""(count, like): a flat array of the element type of `like`, unset; of at least one element."""
scratch_floats = cast(Callable[[int], NDArray[Any]], intrinsic(_floats_typing))
"""(count): likewise, of FP32 numbers."""
