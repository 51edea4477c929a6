"""What a model does to its logits before anybody sees them. R rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from expertmesh_kernels.logits import softcap_


class LogitsEdit(Protocol):
    """A part of the model after the output projection."""

    def __call__(self, logits_RV: Tensor) -> None:
        """Changes logits, float32 [R, V], in place."""
        ...


@dataclass(frozen=True)
class Softcap:
    """Logits become cap * tanh(logit / cap)."""

    cap: float

    def __call__(self, logits_RV: Tensor) -> None:
        """Caps logits in place."""
        softcap_(logits_RV, self.cap)
