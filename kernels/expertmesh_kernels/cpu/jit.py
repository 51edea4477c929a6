"""Typed doors to Numba's decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import overload as _numba_overload

from expertmesh_kernels.cpu.kept import KEPT

Function = TypeVar("Function", bound=Callable[..., object])


def njit(function: Function) -> Function:
    """Compile on first call; keep on disk; release the GIL; never reorder floating point."""
    try:
        compiled = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function)
    except RuntimeError:  # no folder at all can be written, as `cache_dir` has said
        kept_nowhere = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
        return cast(Function, kept_nowhere)
    KEPT.watch(compiled._cache)  # type: ignore[attr-defined]
    return cast(Function, compiled)


def intrinsic(function: Callable[..., object]) -> Callable[..., object]:
    """Turn a typing function into an operation that compiled code can call."""
    return cast("Callable[..., object]", _numba_intrinsic(function))


def chosen_by_types(stand_in: Function) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Decorates what returns the implementation of `stand_in` for the types of its arguments."""
    return cast(
        "Callable[[Callable[..., object]], Callable[..., object]]",
        _numba_overload(stand_in, strict=False),
    )
