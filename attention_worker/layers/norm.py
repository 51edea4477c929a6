"""Normalisation of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from expertmesh_kernels.norm import rms_norm


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight, row by row."""

    weight_H: Tensor
    eps: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H], same dtype."""
        return rms_norm(x_TH, self.weight_H, self.eps)
