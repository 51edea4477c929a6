"""Normalisation. T rows, H hidden size, n heads, D head size."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.norm import add_rms_norm as cpu_add_rms_norm
from expertmesh_kernels.cpu.norm import rms_norm as cpu_rms_norm
from expertmesh_kernels.host import LIKE, as_array, as_heads


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, round_first: bool = True) -> Tensor:
    """x / rms(x) * weight in FP32, in the dtype of x.

    Args:
        x_TH: Any floating dtype.
        weight_H: float32.
        eps: Added to the mean square.
        round_first: x / rms(x) is rounded to the dtype of x before the product, as Llama does it;
            else only the result is.
    """
    if x_TH.shape[1:] != weight_H.shape:
        raise ValueError(f"x has shape {tuple(x_TH.shape)}, expected [T, {len(weight_H)}]")
    if x_TH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.rms_norm(x_TH, weight_H, eps, round_first=round_first)
    if x_TH.device.type != "cpu":
        return rms_norm_reference(x_TH, weight_H, eps, round_first=round_first)
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    num_rows, width = x_TH.shape
    _run_cpu(
        as_array(x_TH).reshape(-1), as_array(out_TH).reshape(-1), (width, width), (num_rows, 1),
        weight_H, eps, round_first,
    )  # fmt: skip
    return out_TH


def add_rms_norm(
    x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float, *, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    """x + y in their dtype, and `rms_norm` of it: the residual stream and what a layer reads."""
    if x_TH.shape != y_TH.shape or x_TH.dtype != y_TH.dtype or x_TH.shape[1:] != weight_H.shape:
        raise ValueError(
            f"x is {x_TH.dtype} {tuple(x_TH.shape)} and y {y_TH.dtype} {tuple(y_TH.shape)}, "
            f"expected twice [T, {len(weight_H)}]"
        )
    if x_TH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.add_rms_norm(x_TH, y_TH, weight_H, eps, round_first=round_first)
    if x_TH.device.type != "cpu":
        sum_TH = x_TH + y_TH
        return sum_TH, rms_norm(sum_TH, weight_H, eps, round_first=round_first)
    x_TH, y_TH = x_TH.contiguous(), y_TH.contiguous()
    sum_TH, out_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    cpu_add_rms_norm(
        x_TH.data_ptr(), y_TH.data_ptr(), sum_TH.data_ptr(), out_TH.data_ptr(),
        LIKE[x_TH.dtype], len(x_TH), weight_H.numpy(), np.float32(eps), round_first,
    )  # fmt: skip
    return sum_TH, out_TH


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
    if x_TnD.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        ops.rms_norm_parts_(parts, weight, eps, round_first=round_first)
        return
    if x_TnD.device.type != "cpu":
        parts.copy_(rms_norm_reference(parts, weight, eps, round_first=round_first))
        return
    x, strides = as_heads(parts)
    _run_cpu(x, x, strides, (parts.shape[0], parts.shape[1]), weight, eps, round_first)


def _run_cpu(
    x: NDArray[np.generic],
    out: NDArray[np.generic],
    strides: tuple[int, int],
    shape: tuple[int, int],
    weight: Tensor,
    eps: float,
    round_first: bool,
) -> None:
    cpu_rms_norm(x, out, strides, shape, as_array(weight.float()), np.float32(eps), round_first)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, round_first: bool = True
) -> Tensor:
    """What `rms_norm` computes over the last dimension, in PyTorch."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normal = normal.to(x.dtype).float()
    return (normal * weight.float()).to(x.dtype)
