"""MXFP4 (OCP microscaling): FP4 in blocks of 32 with a power of two each, as gpt-oss stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.formats.codec import PartData, StoredPart, factors, matrix
from expertmesh.formats.tables import expand_fp4
from expertmesh.host_tensor import Float32
from expertmesh.weight_storage import Shape

BLOCK = 32


@dataclass(frozen=True)
class Mxfp4:
    """`X_blocks` [..., columns / 32, 16], two codes a byte, and `X_scales` [..., columns / 32].

    Blocks run along the inputs of a matrix, and unquantised files of gpt-oss have its inputs as
    rows: they hold the transpose.
    """

    @property
    def name(self) -> str:
        """For messages."""
        return "mxfp4"

    @property
    def transposed(self) -> bool:
        """True."""
        return True

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """Codes and exponents."""
        front, rows, columns = matrix(shape)
        if columns % BLOCK:
            raise ValueError(f"mxfp4 needs columns in blocks of {BLOCK}, and there are {columns}")
        grid = (*front, rows, columns // BLOCK)
        return (
            StoredPart("_blocks", ("U8",), (*grid, BLOCK // 2)),
            StoredPart("_scales", ("U8",), grid, is_scale=True),
        )

    def decode(self, parts: Sequence[PartData], out: Float32) -> None:
        """code * 2 ** (byte - 127)."""
        codes, scales = parts
        expand_fp4(codes.data.view(np.uint8).reshape(-1), out.reshape(-1))
        in_blocks = out.reshape(-1, BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):  # the reader refuses what is not finite
            in_blocks *= factors(scales).reshape(-1, 1)
