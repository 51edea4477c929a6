"""Conversions and random numbers that give the same bits everywhere.

Random numbers use only the raw stream of a bit generator and exact arithmetic: numpy guarantees the
former between versions, and the latter is the same on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertmesh.host_tensor import Array, Float32
from expertmesh.model_config import DtypeName


def from_float32(values: Float32, dtype: DtypeName) -> Array:
    """Finite float32 values in storage form, rounded to nearest, ties to even.

    Raises:
        OverflowError: a value is too large for the type.
    """
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            stored: Array = values.astype(np.float16)
        finite = bool(np.isfinite(stored).all())
    else:
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        finite = not bool(((stored.view(np.uint16) & 0x7F80) == 0x7F80).any())
    if not finite:
        raise OverflowError(f"a value does not fit {dtype}")
    return stored


def permutation(size: int, *seed: int) -> npt.NDArray[np.int64]:
    """A permutation of range(size)."""
    keys = np.random.PCG64(seed).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def normal(shape: tuple[int, ...], *seed: int) -> Float32:
    """About standard normal: the sum of 12 uniform numbers minus 6, exact in float64."""
    raw = np.random.PCG64(seed).random_raw(12 * int(np.prod(shape)))
    uniform = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return np.asarray(uniform.reshape(*shape, 12).sum(-1) - 6.0, np.float32)
