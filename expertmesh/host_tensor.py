"""A tensor in host memory, as numpy holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertmesh.model_config import DtypeName
from expertmesh.safetensors_file import STORAGE

Array = npt.NDArray[np.generic]
Float32 = npt.NDArray[np.float32]

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, writable and owned by whoever holds it."""

    data: Array
    """bfloat16 is held as its bits in uint16, other types as themselves."""
    dtype: DtypeName

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.nbytes


def common_dtype(dtypes: Iterable[DtypeName]) -> DtypeName:
    """The type that holds values of all of these exactly."""
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else "float32"


def to_float32(stored: Array, dtype: DtypeName) -> Float32:
    """Stored values as float32, exactly."""
    if dtype == "bfloat16":
        bits = stored.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return stored.astype(np.float32)


def widen(stored: Array, dtype: DtypeName, wanted: DtypeName) -> Array:
    """Values in a type that `common_dtype` chose for them; nothing is copied if it is their own."""
    return stored if dtype == wanted else to_float32(stored, dtype)


def is_finite(stored: Array, dtype: DtypeName) -> bool:
    """Whether all elements are finite, in pieces so that temporaries stay small."""
    flat = stored.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        if dtype == "bfloat16":
            bits = part.view(np.uint16) & 0x7FFF
            if bits.max() >= 0x7F80:  # exponent of all ones
                return False
        elif not np.isfinite(part.view(STORAGE[dtype])).all():
            return False
    return True
