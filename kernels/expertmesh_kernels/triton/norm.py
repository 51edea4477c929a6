"""Normalisation on CUDA devices. T rows, H hidden size, n heads, D head size."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import kernel, narrow, next_power


@kernel()
def _rms_norm(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_row: tl.tensor,
    x_part: tl.tensor,
    out_row: tl.tensor,
    out_part: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One part of one row; its sum of squares is a tree over BLOCK lanes."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_row + part * x_part + columns, mask=mask, other=0)
    stored_type = out_ptr.dtype.element_ty
    wide = x.to(tl.float32)
    if ADDS:
        y = tl.load(y_ptr + row * width + columns, mask=mask, other=0).to(tl.float32)
        total = narrow(wide + y, stored_type)
        tl.store(sum_ptr + row * width + columns, total, mask=mask)
        wide = total.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    normal = wide * factor
    if ROUND_FIRST:
        normal = narrow(normal, stored_type).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    out_ptr += row * out_row + part * out_part
    tl.store(out_ptr + columns, narrow(normal * weight, stored_type), mask=mask)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, round_first: bool = True) -> Tensor:
    """See `expertmesh_kernels.norm.rms_norm`; rows are contiguous."""
    num_rows, width = x_TH.shape
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    if num_rows:
        _rms_norm[(num_rows, 1)](
            x_TH, x_TH, x_TH, weight_H, out_TH, x_TH.stride(0), width, width, width, width,
            float(eps), False, round_first, BLOCK=next_power(width), num_warps=_num_warps(width),
        )  # fmt: skip
    return out_TH


def add_rms_norm(
    x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float, *, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    """See `expertmesh_kernels.norm.add_rms_norm`: the sum, rounded once, and its norm."""
    num_rows, width = x_TH.shape
    x_TH, y_TH = x_TH.contiguous(), y_TH.contiguous()
    sum_TH, out_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    if num_rows:
        _rms_norm[(num_rows, 1)](
            x_TH, y_TH, sum_TH, weight_H, out_TH, width, width, width, width, width, float(eps),
            True, round_first, BLOCK=next_power(width), num_warps=_num_warps(width),
        )  # fmt: skip
    return sum_TH, out_TH


def rms_norm_parts_(
    parts_TnD: Tensor, weight_D: Tensor, eps: float, *, round_first: bool = True
) -> None:
    """`rms_norm` of each part of each row, in place; parts are contiguous."""
    num_rows, num_parts, width = parts_TnD.shape
    if num_rows:
        strides = parts_TnD.stride(0), parts_TnD.stride(1)
        _rms_norm[(num_rows, num_parts)](
            parts_TnD, parts_TnD, parts_TnD, weight_D, parts_TnD, *strides, *strides, width,
            float(eps), False, round_first, BLOCK=next_power(width), num_warps=_num_warps(width),
        )  # fmt: skip


def _num_warps(width: int) -> int:
    """A warp per 512 elements: a matter of the model, since sums depend on it."""
    return min(max(next_power(width) // 512, 1), 16)
