"""Codes of one byte each with scales and perhaps zero points: compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from expertmesh.formats.codec import FLOAT_CODES, PartData, StoredPart, factors
from expertmesh.formats.scaling import Scaling, unstacked
from expertmesh.formats.tables import expand_e4m3
from expertmesh.host_tensor import Float32
from expertmesh.weight_storage import Shape


@dataclass(frozen=True)
class ScaledBytes:
    """`X` in I8 or E4M3, `X_scale` and, if asymmetric, `X_zero_point` in I8."""

    kind: Literal["int8", "fp8"]
    scaling: Scaling

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind} per {self.scaling.name}"

    @property
    def transposed(self) -> bool:
        """False."""
        return False

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """Codes, scales, zero points."""
        grid = self.scaling.grid(*unstacked(shape))
        found = (
            StoredPart("", ("F8_E4M3" if self.kind == "fp8" else "I8",), shape),
            StoredPart("_scale", FLOAT_CODES, grid, is_scale=True),
        )
        if self.scaling.symmetric:
            return found
        return *found, StoredPart("_zero_point", ("I8",), grid)

    def decode(self, parts: Sequence[PartData], out: Float32) -> None:
        """(code - zero) * scale."""
        codes, scales, *zero_points = parts
        if self.kind == "fp8":
            expand_e4m3(codes.data.view(np.uint8).reshape(-1), out.reshape(-1))
        else:
            out[...] = codes.data
        zeros = zero_points[0].data.astype(np.float32) if zero_points else None
        self.scaling.apply(out, factors(scales), zeros)
