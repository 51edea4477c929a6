"""Rotary position embedding. T rows, n heads, D head size, L positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import RopeConfig
from expertmesh_kernels.cpu.rope import apply_rope as cpu_apply_rope
from expertmesh_kernels.host import as_array, as_heads, as_input


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, float32, [max_len, dim / 2]."""

    cos_LD: Tensor
    sin_LD: Tensor
    interleaved: bool = False
    """Pairs are (2 i, 2 i + 1), else (i, i + dim / 2)."""

    def to(self, device: torch.device) -> RopeTable:
        """The same table on a device."""
        return replace(self, cos_LD=self.cos_LD.to(device), sin_LD=self.sin_LD.to(device))

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both as CPU kernels take them."""
        return as_array(self.cos_LD), as_array(self.sin_LD)


def rope_table(rope: RopeConfig, max_len: int) -> RopeTable:
    """Angles position * frequency for positions 0 to max_len - 1.

    Frequencies and angles are FP32, as in transformers; the attention factor is in the table.
    """
    frequencies_D = _frequencies(rope)
    angles_LD = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies_D[None, :]
    factor = rope.attention_factor
    return RopeTable(angles_LD.cos() * factor, angles_LD.sin() * factor, rope.interleaved)


def _frequencies(rope: RopeConfig) -> Tensor:
    exponents_D = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    periods_D = rope.theta**exponents_D
    frequencies_D = 1.0 / periods_D
    if rope.kind == "linear":
        return frequencies_D / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies_D, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies_D, 1.0 / (rope.factor * periods_D), rope)
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


def _yarn(frequencies_D: Tensor, scaled_D: Tensor, rope: RopeConfig) -> Tensor:
    """Fast waves unchanged, slow waves by `factor`, a ramp over the dimensions between."""
    low, high = (_yarn_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001  # a step instead of a ramp
    ramp_D = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width
    kept_D = 1 - ramp_D.clamp(0, 1)
    return scaled_D * (1 - kept_D) + frequencies_D * kept_D


def _yarn_dimension(rope: RopeConfig, turns: float) -> float:
    """The pair whose wave turns so often within the original context."""
    wavelength = rope.original_max_position / turns
    return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))


def apply_rope(x_TnD: Tensor, positions_T: NDArray[np.int32], table: RopeTable) -> None:
    """Rotate each head in place by its row's position.

    Args:
        x_TnD: Queries or keys; may be a column slice of a larger tensor, or a part of every head.
        positions_T: Each below the table's length; checked by the caller.
        table: Angles; dimensions beyond its 2 * D stay as they are.
    """
    if x_TnD.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        ops.run_rope(x_TnD, positions_T, table)
        return
    if x_TnD.device.type != "cpu":
        apply_rope_reference(x_TnD, positions_T, table)
        return
    x, strides = as_heads(x_TnD)
    cos, sin = table.arrays
    cpu_apply_rope(
        x, strides, x_TnD.shape[1], as_input(positions_T, np.int32), cos, sin, table.interleaved
    )


def apply_rope_reference(x_TnD: Tensor, positions_T: NDArray[np.int32], table: RopeTable) -> None:
    """What `apply_rope` computes, in PyTorch."""
    index_T = torch.from_numpy(np.array(positions_T, np.int64)).to(x_TnD.device)
    cos_T1D = table.cos_LD.to(x_TnD.device)[index_T][:, None]
    sin_T1D = table.sin_LD.to(x_TnD.device)[index_T][:, None]
    rotated = x_TnD[..., : 2 * cos_T1D.shape[-1]]
    if table.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    a, b = (half.to(torch.float32, copy=True) for half in (first, second))
    first.copy_(a * cos_T1D - b * sin_T1D)
    second.copy_(b * cos_T1D + a * sin_T1D)
