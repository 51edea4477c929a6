"""Typed doors to Numba's decorators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import numba
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import overload as _numba_overload

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., object])


def njit(function: Function) -> Function:
    """Compile on first call; keep on disk; release the GIL; never reorder floating point."""
    try:
        compiled = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function)
    except RuntimeError:  # no folder at all can be written, as `cache_dir` has said
        kept_nowhere = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
        return cast(Function, kept_nowhere)
    _tolerate_failed_saves(compiled._cache)  # type: ignore[attr-defined]
    return cast(Function, compiled)


class _Cache(Protocol):
    """What is used of Numba's, which has no public name."""

    save_overload: Callable[[object, object], None]


def _tolerate_failed_saves(cache: _Cache) -> None:
    """A full disk costs the next start its cache, and nothing now: Numba would not compile."""
    save = cache.save_overload

    def save_if_possible(signature: object, data: object) -> None:
        try:
            save(signature, data)
        except OSError as error:
            logger.warning("a compiled kernel cannot be kept for the next start: %s", error)

    cache.save_overload = save_if_possible


def intrinsic(function: Callable[..., object]) -> Callable[..., object]:
    """Turn a typing function into an operation that compiled code can call."""
    return cast("Callable[..., object]", _numba_intrinsic(function))


def chosen_by_types(stand_in: Function) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Decorates what returns the implementation of `stand_in` for the types of its arguments."""
    return cast(
        "Callable[[Callable[..., object]], Callable[..., object]]",
        _numba_overload(stand_in, strict=False),
    )
