"""Typed doors to Numba's decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.extending import intrinsic as _numba_intrinsic

Function = TypeVar("Function", bound=Callable[..., object])


def njit(function: Function) -> Function:
    """Compile on first call; keep on disk; release the GIL; never reorder floating point."""
    compiled = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function)
    return cast(Function, compiled)


def intrinsic(function: Callable[..., object]) -> Callable[..., object]:
    """Turn a typing function into an operation that compiled code can call."""
    return cast("Callable[..., object]", _numba_intrinsic(function))
