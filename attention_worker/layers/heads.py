"""What a model does to queries, keys and values between projection and attention.

A layer has a tuple of edits in the order in which they apply; what a model does without is not
in it. All work in place on views of one projection. T rows, n heads, D dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expertmesh.model_config import GqaConfig
from expertmesh_kernels.norm import rms_norm_heads_
from expertmesh_kernels.rope import RopeTable, apply_rope


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of the rows of a step: views of one tensor."""

    qkv_TC: Tensor
    """Everything: query heads, then key heads, then value heads."""
    q_TnD: Tensor
    k_TnD: Tensor
    qk_TnD: Tensor
    """Queries, then keys."""
    v_TnD: Tensor

    @classmethod
    def split(cls, qkv_TC: Tensor, config: GqaConfig) -> Heads:
        """Views of a projection's output."""
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qk_size = config.q_size + config.k_size
        qk_TnD = qkv_TC[:, :qk_size].view(-1, num_q + num_kv, config.head_dim)
        return cls(
            qkv_TC=qkv_TC,
            q_TnD=qk_TnD[:, :num_q],
            k_TnD=qk_TnD[:, num_q:],
            qk_TnD=qk_TnD,
            v_TnD=qkv_TC[:, qk_size:].view(-1, num_kv, config.value_dim),
        )


class HeadEdit(Protocol):
    """One step between projection and attention."""

    def __call__(self, heads: Heads, positions_T: npt.NDArray[np.int32]) -> None:
        """Changes heads in place; a row's result depends on that row and its position alone."""
        ...


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMS norm of queries and keys."""

    q_weight: Tensor
    """float32, [D], or [n * D] where all heads of a row are normalised at once."""
    k_weight: Tensor
    eps: float
    whole: bool
    """All heads of a row at once; else each head."""
    round_first: bool

    def __call__(self, heads: Heads, positions_T: npt.NDArray[np.int32]) -> None:
        """Normalises queries and keys."""
        for x_TnD, weight in ((heads.q_TnD, self.q_weight), (heads.k_TnD, self.k_weight)):
            rms_norm_heads_(x_TnD, weight, self.eps, whole=self.whole, round_first=self.round_first)


@dataclass(frozen=True)
class Clip:
    """Queries, keys and values are clamped to [-limit, limit]."""

    limit: float

    def __call__(self, heads: Heads, positions_T: npt.NDArray[np.int32]) -> None:
        """Clamps everything."""
        heads.qkv_TC.clamp_(-self.limit, self.limit)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys."""

    table: RopeTable

    def __call__(self, heads: Heads, positions_T: npt.NDArray[np.int32]) -> None:
        """Rotates queries and keys."""
        apply_rope(heads.qk_TnD, positions_T, self.table)


@dataclass(frozen=True)
class ValueScale:
    """Values times a constant."""

    factor: float

    def __call__(self, heads: Heads, positions_T: npt.NDArray[np.int32]) -> None:
        """Multiplies values."""
        heads.v_TnD.mul_(self.factor)
