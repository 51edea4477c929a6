"""Checksums of an expert's weights in memory, piece by piece, as they were right after packing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expert_worker.expert_reader import checksum_of
from expertmesh_kernels.grouped_mlp import ExpertWeights

PIECE_BYTES = 1 << 21
"""Summed at a time: 0.1 to 0.3 ms."""


@dataclass(frozen=True)
class Piece:
    """A part of an expert's memory."""

    array: int
    """Index in `arrays_of`."""
    begin: int
    end: int
    """Bytes."""
    checksum: int

    def is_intact(self, weights: ExpertWeights) -> bool:
        """True if the memory is as it was."""
        return checksum_of(arrays_of(weights)[self.array][self.begin : self.end]) == self.checksum

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.begin


def sums_of(weights: ExpertWeights) -> tuple[Piece, ...]:
    """All pieces of an expert as it is now."""
    return tuple(_pieces(weights))


def arrays_of(weights: ExpertWeights) -> tuple[npt.NDArray[np.uint8], ...]:
    """All memory of an expert that CPU kernels read, as bytes."""
    layers = (weights.gate_up, weights.down)
    arrays = (array for layer in layers for array in (layer.panels, layer.bias))
    return tuple(array.view(np.uint8) for array in arrays)


def _pieces(weights: ExpertWeights) -> Iterator[Piece]:
    for index, data in enumerate(arrays_of(weights)):
        for begin in range(0, data.size, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, data.size)
            yield Piece(index, begin, end, checksum_of(data[begin:end]))
