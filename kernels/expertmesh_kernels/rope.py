"""Rotary position embedding. T rows, n heads, D head size, L positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import RopeConfig
from expertmesh_kernels.cpu.rope import apply_rope as cpu_apply_rope
from expertmesh_kernels.host import as_array, as_input, as_rows


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, float32, [max_len, dim / 2]."""

    cos_LD: Tensor
    sin_LD: Tensor

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both as CPU kernels take them."""
        return as_array(self.cos_LD), as_array(self.sin_LD)


def rope_table(rope: RopeConfig, max_len: int) -> RopeTable:
    """Angles position * frequency for positions 0 to max_len - 1.

    Frequencies and angles are FP32, as in transformers.
    """
    frequencies_D = _frequencies(rope)
    angles_LD = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies_D[None, :]
    return RopeTable(angles_LD.cos(), angles_LD.sin())


def _frequencies(rope: RopeConfig) -> Tensor:
    exponents_D = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies_D = 1.0 / (rope.theta**exponents_D)
    if rope.kind == "linear":
        return frequencies_D / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies_D, rope)
    return frequencies_D


def _llama3(frequencies_D: Tensor, rope: RopeConfig) -> Tensor:
    """Slow waves by `factor`, fast waves unchanged, a ramp between."""
    wavelengths_D = 2 * math.pi / frequencies_D
    slow = rope.original_max_position / rope.low_freq_factor
    fast = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    ramp_D = (rope.original_max_position / wavelengths_D - rope.low_freq_factor) / span
    scaled_D = frequencies_D / rope.factor
    blended_D = (1 - ramp_D) * scaled_D + ramp_D * frequencies_D
    result_D = torch.where(wavelengths_D > slow, scaled_D, frequencies_D)
    is_between_D = (wavelengths_D >= fast) & (wavelengths_D <= slow)
    return torch.where(is_between_D, blended_D, result_D)


def apply_rope(x_TnD: Tensor, positions_T: NDArray[np.int32], table: RopeTable) -> None:
    """Rotate each head in place by its row's position; pairs are (i, i + dim / 2).

    Args:
        x_TnD: Queries or keys; may be a column slice of a larger tensor.
        positions_T: Each below the table's length; checked by the caller.
        table: Angles; dimensions beyond its 2 * D stay as they are.
    """
    if x_TnD.device.type != "cpu":
        apply_rope_reference(x_TnD, positions_T, table)
        return
    _, num_heads, head_dim = x_TnD.shape
    x, row_stride = as_rows(x_TnD)
    cos, sin = table.arrays
    cpu_apply_rope(x, row_stride, num_heads, head_dim, as_input(positions_T, np.int32), cos, sin)


def apply_rope_reference(x_TnD: Tensor, positions_T: NDArray[np.int32], table: RopeTable) -> None:
    """What `apply_rope` computes, in PyTorch."""
    index_T = torch.from_numpy(np.array(positions_T, np.int64)).to(x_TnD.device)
    cos_T1D = table.cos_LD.to(x_TnD.device)[index_T][:, None]
    sin_T1D = table.sin_LD.to(x_TnD.device)[index_T][:, None]
    half = cos_T1D.shape[-1]
    a, b = x_TnD[..., : 2 * half].to(torch.float32, copy=True).chunk(2, dim=-1)
    x_TnD[..., :half] = a * cos_T1D - b * sin_T1D
    x_TnD[..., half : 2 * half] = b * cos_T1D + a * sin_T1D
