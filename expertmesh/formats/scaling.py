"""Which elements of a matrix share a scale, in the words of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertmesh.formats.codec import blocks, matrix
from expertmesh.host_tensor import Float32
from expertmesh.weight_storage import Shape


@dataclass(frozen=True)
class Scaling:
    """What shares a scale, and perhaps a zero point: (code - zero) * scale."""

    strategy: str
    """tensor, channel (one per row), group (one per `block[1]` columns of a row) or block."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns of a block; (1, columns) of a group. The last block may be shorter, a
    group not."""
    symmetric: bool = True
    """No zero points."""

    @property
    def name(self) -> str:
        """For messages."""
        sizes = {"group": f" of {self.block[1]}", "block": f" of {self.block[0]} x {self.block[1]}"}
        asymmetric = "" if self.symmetric else ", asymmetric"
        return f"{self.strategy}{sizes.get(self.strategy, '')}{asymmetric}"

    def grid(self, rows: int, columns: int) -> Shape:
        """Shape of the scales.

        Raises:
            ValueError: the groups do not divide the columns.
        """
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (rows, 1)
        height, width = self.block
        if self.strategy == "group" and columns % width:
            raise ValueError(f"groups of {width} columns do not divide its {columns} columns")
        return (blocks(rows, height), blocks(columns, width))

    def apply(self, out: Float32, scales: Float32, zeros: Float32 | None = None) -> None:
        """Subtracts zero points, multiplies by scales, both of shape `grid`; in place."""
        if self.strategy == "block":
            assert zeros is None, "zero points of blocks"
            multiply_blocks(out, scales, *self.block)
            return
        rows, columns = out.shape
        width = self.block[1] if self.strategy == "group" else columns
        grouped = out.reshape(rows, -1, width)
        with np.errstate(over="ignore", invalid="ignore"):  # the reader refuses infinities
            if zeros is not None:
                grouped -= zeros.reshape(-1, zeros.shape[-1], 1)
            grouped *= scales.reshape(-1, scales.shape[-1], 1)


def multiply_blocks(out: Float32, scales: Float32, block_rows: int, block_columns: int) -> None:
    """Multiplies each block of a matrix by its scale, in place."""
    columns = out.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # the reader refuses what is not finite
        for index, row_scales in enumerate(scales):
            wide = np.repeat(row_scales, block_columns)[:columns]
            out[index * block_rows : (index + 1) * block_rows] *= wide


def unstacked(shape: Shape) -> tuple[int, int]:
    """Rows and columns.

    Raises:
        ValueError: there are more or fewer axes.
    """
    front, rows, columns = matrix(shape)
    if front:
        raise ValueError("experts that are stacked in one tensor are not supported in this format")
    return rows, columns
