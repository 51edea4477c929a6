"""A parameter as the loader gets it: weights of the files, one below the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertmesh.errors import CheckpointError
from expertmesh.formats.coded import CodedMatrix, stacked
from expertmesh.formats.keep import Coding
from expertmesh.formats.storage import QuantizedWeight
from expertmesh.host_tensor import Array, HostTensor, common_dtype, is_finite, widen
from expertmesh.model_config import DtypeName
from expertmesh.safetensors_file import STORAGE
from expertmesh.weight_storage import OnBytes, Shape, StoredWeight, unheard

_BLOCK = 64
"""Columns that are transposed at a time."""


@dataclass(frozen=True)
class Arrangement:
    """How a stored weight differs from the rows that a parameter has."""

    transposed: bool = False
    """Rows are stored as columns."""
    interleaved: bool = False
    """Rows of gate and up take turns, gate first; the parameter has all of gate, then up."""

    def num_rows(self, stored: Shape) -> int:
        """Rows of the parameter that a stored weight of this shape holds."""
        return stored[-1] if self.transposed else stored[0]

    def place(self, stored: Array, rows: Array) -> None:
        """Copies a stored weight to its rows."""
        if not self.transposed:
            self._order(stored, rows)
            return
        if stored.flags.f_contiguous:  # codes were of the transpose
            self._order(stored.T, rows)
            return
        for start in range(0, len(stored), _BLOCK):  # a block stays in the cache
            block = slice(start, start + _BLOCK)
            self._order(np.ascontiguousarray(stored[block].T), rows[:, block])

    def _order(self, found: Array, rows: Array) -> None:
        if self.interleaved:
            half = len(rows) // 2
            rows[:half], rows[half:] = found[0::2], found[1::2]
        else:
            rows[...] = found


AS_STORED = Arrangement()


@dataclass(frozen=True)
class ParameterSource:
    """Where a parameter is read from."""

    weights: tuple[StoredWeight, ...]
    """One below the other."""
    shape: Shape
    """Of the parameter."""
    index: int | None = None
    """Entry along the first axis of each weight, if they are stacked."""
    arrangement: Arrangement = AS_STORED

    @property
    def dtype(self) -> DtypeName:
        """Type of the parameter: that of its weights, or float32 if they differ."""
        return common_dtype(weight.dtype for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(weight.nbytes(self.index) for weight in self.weights)

    def read(self, on_bytes: OnBytes = unheard) -> HostTensor:
        """The parameter, in new memory.

        Args:
            on_bytes: Told of what is read, always in the same order.

        Raises:
            CheckpointError: a weight cannot be read, or holds NaN or infinity.
        """
        data = np.empty(self.shape, STORAGE[self.dtype])
        start = 0
        for weight in self.weights:
            stored = weight.shape if self.index is None else weight.shape[1:]
            stop = start + self.arrangement.num_rows(stored)
            self._fill(weight, data[start:stop], on_bytes)
            start = stop
        assert start == self.shape[0], f"{self.weights[0].name}: {start} rows of {self.shape}"
        return HostTensor(data, self.dtype)

    @property
    def coding(self) -> Coding | None:
        """How kernels take the parameter as it is stored; None if none does."""
        found = {self._coding(weight) for weight in self.weights}
        return found.pop() if len(found) == 1 else None

    def _coding(self, weight: StoredWeight) -> Coding | None:
        if not isinstance(weight, QuantizedWeight):
            return None
        alike = weight.codec.transposed == self.arrangement.transposed
        return weight.coding if alike else None

    def read_coded(self, on_bytes: OnBytes = unheard) -> CodedMatrix:
        """The parameter as it is stored, for kernels; it has a coding.

        Args:
            on_bytes: Told of what is read, in the same order as by `read`.

        Raises:
            CheckpointError: a weight cannot be read, or holds NaN or infinity.
        """
        parts = [
            weight.read_coded(self.index, on_bytes)
            for weight in self.weights
            if isinstance(weight, QuantizedWeight)
        ]
        assert len(parts) == len(self.weights), "a parameter without a coding"
        matrix = stacked([self._ordered(part) for part in parts])
        assert matrix.codes.shape == self.shape, f"{matrix.codes.shape} is not {self.shape}"
        return matrix

    def _ordered(self, matrix: CodedMatrix) -> CodedMatrix:
        if not self.arrangement.interleaved:
            return matrix
        count = len(matrix.codes)
        return matrix.rows(np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]))

    def _fill(self, weight: StoredWeight, rows: Array, on_bytes: OnBytes) -> None:
        direct = self.arrangement == AS_STORED and weight.dtype == self.dtype
        data = weight.read(self.index, rows if direct else None, on_bytes)
        if not direct:
            self.arrangement.place(widen(data, weight.dtype, self.dtype), rows)
        if not is_finite(rows, self.dtype):
            raise CheckpointError(
                f"{weight.path}: tensor {weight.name}: holds NaN or infinity, expected finite "
                "weights",
                fix="download the file again",
            )
