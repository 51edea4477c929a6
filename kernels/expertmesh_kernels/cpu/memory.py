"""Arrays from addresses, so that one call takes the weights of any number of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types as untyped_types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import intrinsic, njit

types: Any = untyped_types


def _pointer_typing(_context: Any, _address: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


_pointer = cast(Callable[..., Any], intrinsic(_pointer_typing))


@njit
def array_at(address: int, size: int, like: NDArray[Any]) -> NDArray[Any]:
    """The memory at an address as a flat array of the element type of `like`.

    The owner of the memory keeps it alive; address 0 goes with size 0.
    """
    found: NDArray[Any] = carray(_pointer(address, like), (size,))
    return found


FLOATS = np.empty(0, np.float32)
"""For `like`."""
