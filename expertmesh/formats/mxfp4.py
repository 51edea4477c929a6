"""MXFP4 (OCP microscaling): FP4 in blocks of 32 with a power of two each, as gpt-oss stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.formats.tables import expand_fp4
from expertmesh.formats.weight_format import Float32, PartData, StoredPart, exponents, matrix

BLOCK = 32


@dataclass(frozen=True)
class Mxfp4:
    """`X_blocks` [..., columns / 32, 16], two codes a byte, and `X_scales` [..., columns / 32]."""

    @property
    def name(self) -> str:
        """For messages."""
        return "mxfp4"

    def parts(self, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Codes and exponents."""
        front, rows, columns = matrix(shape)
        if columns % BLOCK:
            raise ValueError(f"mxfp4 needs columns in blocks of {BLOCK}, and there are {columns}")
        grid = (*front, rows, columns // BLOCK)
        return (
            StoredPart("_blocks", ("U8",), (*grid, BLOCK // 2)),
            StoredPart("_scales", ("U8",), grid),
        )

    def decode(self, parts: Sequence[PartData], shape: tuple[int, int]) -> Float32:
        """code * 2 ** (byte - 127)."""
        codes, scales = parts
        weight = expand_fp4(codes.data.view(np.uint8)).reshape(-1, BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):  # the reader refuses what is not finite
            weight *= exponents(scales.data).reshape(-1, 1)
        return weight.reshape(shape)
