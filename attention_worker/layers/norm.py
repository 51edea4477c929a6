"""Normalisation of hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from expertmesh_kernels.norm import add_rms_norm, rms_norm


class Norm(Protocol):
    """What is done to rows before or after a part of a layer."""

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H], same dtype; the input is not changed."""
        ...


class ResidualNorm(Norm, Protocol):
    """A norm on the residual stream."""

    def add(self, x_TH: Tensor, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it."""
        ...


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight, row by row."""

    weight_H: Tensor
    """float32; what a family adds to the stored weight is in it."""
    eps: float
    round_first: bool = True
    """x / rms(x) is rounded to the dtype of x before it is multiplied."""

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H], same dtype."""
        return rms_norm(x_TH, self.weight_H, self.eps, round_first=self.round_first)

    def add(self, x_TH: Tensor, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it, in one pass."""
        return add_rms_norm(x_TH, y_TH, self.weight_H, self.eps, round_first=self.round_first)


@dataclass(frozen=True)
class NoNorm:
    """For layers that do not normalise here."""

    def __call__(self, x_TH: Tensor) -> Tensor:
        """The input itself."""
        return x_TH
