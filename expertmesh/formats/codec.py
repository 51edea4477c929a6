"""The contract of a quantised format: which tensors hold a weight, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from expertmesh.host_tensor import Array, Float32, to_float32
from expertmesh.safetensors_file import DTYPE_NAMES, STORAGE
from expertmesh.weight_storage import Shape

FLOAT_CODES = tuple(DTYPE_NAMES)
"""Type codes of safetensors that scales may have."""

NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {
    **{code: STORAGE[name] for code, name in DTYPE_NAMES.items()},
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""How data of a type is held; types that numpy lacks are held as their bits."""


@dataclass(frozen=True)
class StoredPart:
    """One of the stored tensors of a weight."""

    suffix: str
    """Of its name, after the name that the plain weight would have."""
    dtype_codes: tuple[str, ...]
    """Type codes of safetensors that it may have."""
    shape: Shape
    is_scale: bool = False
    """Its values are factors: NaN and infinity among them are its own fault."""


@dataclass(frozen=True)
class PartData:
    """A part as read from a file."""

    data: Array
    """Held as `NUMPY_TYPES` says."""
    dtype_code: str


class Codec(Protocol):
    """How a matrix [rows, columns] is stored. Immutable; equal codecs decode alike."""

    @property
    def name(self) -> str:
        """For messages, e.g. `fp8 in blocks of 128 x 128`."""

    @property
    def transposed(self) -> bool:
        """The matrix is the transpose of the weight that unquantised files have."""

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """The stored tensors of a matrix of `shape`, or of several: axes in front of the two.

        Raises:
            ValueError: nothing of this shape can be stored so; the text says why.
        """

    def decode(self, parts: Sequence[PartData], out: Float32) -> None:
        """Writes the matrix into `out` [rows, columns], exact up to one rounding to FP32.

        Codes that stand for NaN become NaN, and what is too large infinity: whoever reads the
        matrix has to refuse them.

        Args:
            parts: Data in the order of `parts`, of one matrix.
            out: Contiguous.

        Raises:
            ValueError: a part contradicts the shape; the text begins with the part's suffix.
        """


def matrix(shape: Shape) -> tuple[Shape, int, int]:
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


def factors(part: PartData) -> Float32:
    """Scales of any type, exactly. Bytes are exponents, 2 ** (byte - 127); 255 is NaN."""
    if part.dtype_code in DTYPE_NAMES:
        return to_float32(part.data, DTYPE_NAMES[part.dtype_code])
    return _POWERS[part.data.view(np.uint8)]


_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
