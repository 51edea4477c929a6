"""Normalisation. T rows, H hidden size, n heads, D head size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertmesh_kernels.cpu.norm import rms_norm as cpu_rms_norm
from expertmesh_kernels.host import as_array, as_heads


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, round_first: bool = True) -> Tensor:
    """x / rms(x) * weight in FP32, in the dtype of x.

    Args:
        x_TH: Any floating dtype; may be a column slice of a larger tensor.
        weight_H: float32.
        eps: Added to the mean square.
        round_first: x / rms(x) is rounded to the dtype of x before the product, as Llama does it;
            else only the result is.
    """
    if x_TH.shape[1:] != weight_H.shape:
        raise ValueError(f"x has shape {tuple(x_TH.shape)}, expected [T, {len(weight_H)}]")
    if x_TH.device.type != "cpu":
        return rms_norm_reference(x_TH, weight_H, eps, round_first=round_first)
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    _run_cpu(x_TH[:, None], weight_H, eps, round_first, out_TH[:, None])
    return out_TH


def rms_norm_heads_(
    x_TnD: Tensor, weight: Tensor, eps: float, *, whole: bool, round_first: bool = True
) -> None:
    """`rms_norm` in place: of each head, or of all heads of a row at once.

    Args:
        x_TnD: May be a column slice of a larger tensor.
        weight: float32: [D] for every head, or [n * D] for the whole row.
        eps: Added to the mean square.
        whole: All heads of a row are normalised together.
        round_first: As for `rms_norm`.
    """
    parts = x_TnD.flatten(1)[:, None] if whole else x_TnD  # of a slice with whole rows: a view
    if whole and parts.data_ptr() != x_TnD.data_ptr():
        raise ValueError(f"strides are {x_TnD.stride()}, expected contiguous rows")
    if parts.shape[2:] != weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({parts.shape[2]},)")
    if x_TnD.device.type != "cpu":
        parts.copy_(rms_norm_reference(parts, weight, eps, round_first=round_first))
        return
    _run_cpu(parts, weight, eps, round_first, parts)


def _run_cpu(
    x_TnD: Tensor, weight_D: Tensor, eps: float, round_first: bool, out_TnD: Tensor
) -> None:
    x, x_strides = as_heads(x_TnD)
    out, out_strides = as_heads(out_TnD)
    num_rows, num_parts, _ = x_TnD.shape
    cpu_rms_norm(
        x, x_strides, (num_rows, num_parts), as_array(weight_D.float()), np.float32(eps),
        round_first, out, out_strides,
    )  # fmt: skip


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, round_first: bool = True
) -> Tensor:
    """What `rms_norm` computes over the last dimension, in PyTorch."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normal = normal.to(x.dtype).float()
    return (normal * weight.float()).to(x.dtype)
