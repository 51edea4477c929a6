"""Quantised matrices as they are, for kernels that decode them while they multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from expertmesh.formats.tables import FP4_VALUES, e4m3_values
from expertmesh.host_tensor import Float32

Bytes = npt.NDArray[np.uint8]
CodeName = Literal["int8", "int4", "fp8", "mxfp4"]

INT4_ZERO = 8
"""The code of int4 that stands for 0 where there are no zero points."""


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [rows, columns] of codes; rows share nothing.

    Each value is the number that the code stands for, less the zero point, times the scale of its
    row and group of columns.
    """

    kind: CodeName
    codes: Bytes
    """[rows, columns], one code a byte: int8 in two's complement, fp8 as E4M3, mxfp4 as E2M1 in the
    lowest 4 bits, int4 as 0 to 15."""
    scales: Float32
    """[rows, groups]"""
    group: int
    """Columns of a group, of which the last one may be shorter; 0: each row is one group."""
    zeros: Bytes | None = None
    """[rows, groups] zero points of int4, 0 to 15; None for 8 everywhere."""

    @property
    def num_columns(self) -> int:
        """Columns."""
        return int(self.codes.shape[1])

    def decoded(self) -> Float32:
        """The values in FP32."""
        values = _TABLES[self.kind][self.codes]
        if self.kind == "int4":
            zeros = np.full(self.scales.shape, INT4_ZERO) if self.zeros is None else self.zeros
            values = values - self._wide(zeros.astype(np.float32))
        return values * self._wide(self.scales)

    def is_finite(self) -> bool:
        """Whether all values are; scales are taken to be."""
        if self.kind == "fp8" and bool(((self.codes & 0x7F) == 0x7F).any()):
            return False
        largest = np.abs(self.scales).max(initial=0.0)
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(largest) * np.float32(_LARGEST[self.kind])))

    def rows(self, order: npt.NDArray[np.intp]) -> CodedMatrix:
        """The matrix of some rows, in an order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros)

    def _wide(self, of_groups: Float32) -> Float32:
        return np.repeat(of_groups, self.group or self.num_columns, 1)[:, : self.num_columns]


_TABLES: dict[CodeName, Float32] = {
    "int8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32),
    "int4": np.arange(16).astype(np.float32),
    "fp8": e4m3_values(),
    "mxfp4": np.array([*FP4_VALUES, *(-value for value in FP4_VALUES)], np.float32),
}


_LARGEST: dict[CodeName, float] = {"int8": 128.0, "int4": 15.0, "fp8": 448.0, "mxfp4": 6.0}


def stacked(parts: list[CodedMatrix]) -> CodedMatrix:
    """Matrices of one kind and group, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    has_zeros = any(part.zeros is not None for part in parts)
    zeros = [
        np.full(part.scales.shape, INT4_ZERO, np.uint8) if part.zeros is None else part.zeros
        for part in parts
    ]
    return replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=np.concatenate(zeros) if has_zeros else None,
    )


def quantize_int8(weight: Float32) -> CodedMatrix:
    """The nearest integers of -127 to 127, with a scale per row."""
    scales = _factors(np.abs(weight).max(1, keepdims=True, initial=0.0) / np.float32(127))
    codes = np.rint(weight / scales).astype(np.int8)
    return CodedMatrix("int8", codes.view(np.uint8), scales, 0)


def quantize_int4(weight: Float32, group: int) -> CodedMatrix:
    """The nearest integers of -7 to 7, with a scale per row and group."""
    starts = np.arange(0, weight.shape[1], group)
    peaks = np.maximum.reduceat(np.abs(weight), starts, axis=1)
    scales = _factors(peaks / np.float32(7))
    wide = np.repeat(scales, group, 1)[:, : weight.shape[1]]
    codes = np.rint(weight / wide).astype(np.int8) + INT4_ZERO
    return CodedMatrix("int4", codes.astype(np.uint8), scales, group)


def _factors(scales: npt.NDArray[np.floating]) -> Float32:
    """Scales, 1 where all is zero (or so small that dividing by it is not)."""
    return np.where(scales >= np.finfo(np.float32).tiny, scales, 1).astype(np.float32)
