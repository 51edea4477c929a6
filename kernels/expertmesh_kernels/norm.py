"""Normalisation. T rows, H hidden size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertmesh_kernels.cpu.norm import rms_norm as cpu_rms_norm
from expertmesh_kernels.host import as_array


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Llama's RMSNorm: normalise in FP32, round to the dtype of x, times the weight.

    Args:
        x_TH: Any floating dtype.
        weight_H: Same dtype as x.
        eps: Added to the mean square.
    """
    if x_TH.shape[1:] != weight_H.shape:
        raise ValueError(f"x has shape {tuple(x_TH.shape)}, expected [T, {len(weight_H)}]")
    if x_TH.device.type != "cpu":
        return rms_norm_reference(x_TH, weight_H, eps)
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    cpu_rms_norm(as_array(x_TH), as_array(weight_H), np.float32(eps), as_array(out_TH))
    return out_TH


def rms_norm_reference(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes, in PyTorch."""
    wide_TH = x_TH.float()
    normal_TH = wide_TH * torch.rsqrt(wide_TH.pow(2).mean(-1, keepdim=True) + eps)
    return normal_TH.to(x_TH.dtype) * weight_H
