"""FP8 weights with one scale per block of rows and columns (DeepSeek-V3, Qwen3 and others)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.formats.codec import FLOAT_CODES, PartData, StoredPart, blocks, factors, matrix
from expertmesh.formats.scaling import multiply_blocks
from expertmesh.formats.tables import expand_e4m3
from expertmesh.host_tensor import Float32
from expertmesh.weight_storage import Shape


@dataclass(frozen=True)
class Fp8Blocks:
    """`X` in E4M3 and `X_scale_inv`, a factor per block (whatever its name says, it multiplies).

    The last blocks of rows and columns may be shorter.
    """

    block_rows: int
    block_columns: int
    byte_scales: bool = False
    """Scales may also be stored as biased exponents in U8 (`scale_fmt` is ue8m0)."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"fp8 in blocks of {self.block_rows} x {self.block_columns}"

    @property
    def transposed(self) -> bool:
        """False."""
        return False

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """Codes and scales."""
        front, rows, columns = matrix(shape)
        grid = (*front, blocks(rows, self.block_rows), blocks(columns, self.block_columns))
        codes = (*FLOAT_CODES, "F8_E8M0", *(("U8",) if self.byte_scales else ()))
        return (
            StoredPart("", ("F8_E4M3",), shape),
            StoredPart("_scale_inv", codes, grid, is_scale=True),
        )

    def decode(self, parts: Sequence[PartData], out: Float32) -> None:
        """code * scale."""
        codes, scales = parts
        expand_e4m3(codes.data.view(np.uint8).reshape(-1), out.reshape(-1))
        multiply_blocks(out, factors(scales), self.block_rows, self.block_columns)
