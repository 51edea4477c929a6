"""Integers packed into words, with scales and perhaps zero points: compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.formats.codec import FLOAT_CODES, PartData, StoredPart, blocks, factors
from expertmesh.formats.scaling import Scaling, unstacked
from expertmesh.formats.tables import expand_int4
from expertmesh.host_tensor import Array, Float32
from expertmesh.weight_storage import Shape

WORD_BITS = 32


@dataclass(frozen=True)
class PackedIntegers:
    """`X_packed`, integers of 4 or 8 bits side by side in I32 words, first in the lowest bits.

    Also `X_scale`, `X_shape` [2] and, if asymmetric, `X_zero_point`, which is packed along the
    rows. Codes and zero points are stored with 2 ** (bits - 1) added.
    """

    bits: int
    scaling: Scaling

    @property
    def name(self) -> str:
        """For messages."""
        return f"packed int{self.bits} per {self.scaling.name}"

    @property
    def transposed(self) -> bool:
        """False."""
        return False

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """Words, scales, shape, zero points."""
        rows, columns = unstacked(shape)
        grid = self.scaling.grid(rows, columns)
        found = (
            StoredPart("_packed", ("I32",), (rows, self._words(columns))),
            StoredPart("_scale", FLOAT_CODES, grid, is_scale=True),
            StoredPart("_shape", ("I64", "I32"), (2,)),
        )
        if self.scaling.symmetric:
            return found
        return *found, StoredPart("_zero_point", ("I32",), (self._words(rows), grid[-1]))

    def decode(self, parts: Sequence[PartData], out: Float32) -> None:
        """(code - zero) * scale."""
        words, scales, shape, *zero_points = parts
        if shape.data.tolist() != list(out.shape):
            raise ValueError(f"_shape: expected {list(out.shape)}, found {shape.data.tolist()}")
        self._unpack(words.data, out)
        zeros = None
        if zero_points:
            packed = zero_points[0].data
            zeros = np.empty((packed.shape[1], len(out)), np.float32)
            self._unpack(np.ascontiguousarray(packed.T), zeros)
            zeros = zeros.T
        self.scaling.apply(out, factors(scales), zeros)

    def _words(self, count: int) -> int:
        return blocks(count * self.bits, WORD_BITS)

    def _unpack(self, words: Array, out: Float32) -> None:
        """Rows of words to rows of integers; what the last word of a row holds beyond is left."""
        codes = words.view(np.uint8)  # words are little-endian in the file and in memory
        if self.bits == 8:
            np.subtract(codes[:, : out.shape[1]], np.float32(128), out=out)
            return
        count = 2 * codes.shape[1]
        wide = out if count == out.shape[1] else np.empty((len(codes), count), np.float32)
        expand_int4(codes.reshape(-1), wide.reshape(-1))
        if wide is not out:
            out[...] = wide[:, : out.shape[1]]
