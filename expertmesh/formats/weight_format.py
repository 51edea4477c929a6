"""The contract of a quantised format: which tensors a weight is stored as, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Float32 = npt.NDArray[np.float32]

FLOAT_CODES = ("F32", "BF16", "F16")
"""Type codes of safetensors that a plain weight may have, and a scale."""


@dataclass(frozen=True)
class StoredPart:
    """One of the stored tensors of a weight."""

    suffix: str
    """Of its name, after the name that the plain weight would have."""
    dtype_codes: tuple[str, ...]
    """Type codes of safetensors that it may have."""
    shape: tuple[int, ...]

    def describe_dtypes(self) -> str:
        """For messages."""
        return " or ".join(self.dtype_codes)


@dataclass(frozen=True)
class PartData:
    """A part as read from a file: bytes of the type `dtype_code`, as `NUMPY_TYPES` holds them."""

    data: Array
    dtype_code: str


class WeightFormat(Protocol):
    """How a weight [rows, columns] is stored. Immutable; equal formats decode alike."""

    @property
    def name(self) -> str:
        """For messages, e.g. `fp8 in blocks of 128 x 128`."""

    def parts(self, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """The stored tensors of a weight of `shape`; a stacked one has axes in front of the two.

        Raises:
            ValueError: no weight of this shape can be stored so; the text says why.
        """

    def decode(self, parts: Sequence[PartData], shape: tuple[int, int]) -> Float32:
        """The weight, in new memory, exact up to one rounding to FP32.

        Codes that stand for NaN become NaN: whoever reads the weight has to refuse it.

        Args:
            parts: Data in the order of `parts`, one entry of a stacked weight without its axis.
            shape: Of the weight.

        Raises:
            ValueError: a part contradicts the shape; the text begins with the part's suffix.
        """


NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""How data of a type is held; types that numpy lacks are held as their bits."""


def matrix(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Axes in front, rows, columns.

    Raises:
        ValueError: fewer than two axes.
    """
    if len(shape) < 2:
        raise ValueError(f"only matrices are quantised, and its shape is {list(shape)}")
    *front, rows, columns = shape
    return tuple(front), rows, columns


def blocks(size: int, block: int) -> int:
    """Blocks that cover `size`; the last one may be shorter."""
    return math.ceil(size / block)


def to_float32(part: PartData) -> Float32:
    """Floating-point data of any type, exactly."""
    if part.dtype_code == "BF16":
        return (part.data.astype(np.uint32) << 16).view(np.float32)
    if part.dtype_code in ("F8_E8M0", "U8"):
        return exponents(part.data)
    return part.data.astype(np.float32)


def exponents(data: Array) -> Float32:
    """Powers of two stored as biased bytes, 2 ** (byte - 127); 255 stands for NaN."""
    return _POWERS[data.view(np.uint8)]


_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
