"""Gated activations on CUDA devices. R rows, I intermediate size."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.triton.jit import device, kernel, narrow, sigmoid, tanh

BLOCK = 1024


@device
def activate(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """act(gate, up) of FP32 tiles; `Activation` has the equations."""
    if KIND == "silu":
        result = gate * sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = 0.5 * gate * (1.0 + tanh(inner)) * up
    else:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = (up + 1.0) * gate * sigmoid(alpha * gate)
    return result


@kernel()
def _gated_activation(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_up_ptr += row * row_stride
    gate = tl.load(gate_up_ptr + columns, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + columns, mask=mask, other=0).to(tl.float32)
    result = activate(gate, up, alpha, limit, KIND)
    tl.store(out_ptr + row * width + columns, narrow(result, out_ptr.dtype.element_ty), mask=mask)


@kernel()
def _sigmoid_scaled(
    x_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    factor = sigmoid(tl.load(logits_ptr + row))
    x = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0).to(tl.float32)
    result = narrow(factor * x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, result, mask=mask)


def gated_activation(gate_up_R2I: Tensor, activation: Activation) -> Tensor:
    """See `expertmesh_kernels.activation.gated_activation`; rows are contiguous."""
    num_rows, width = gate_up_R2I.shape[0], gate_up_R2I.shape[1] // 2
    out_RI = gate_up_R2I.new_empty(num_rows, width)
    if num_rows:
        _gated_activation[(num_rows, -(-width // BLOCK))](
            gate_up_R2I, out_RI, gate_up_R2I.stride(0), width, *numbers(activation),
            KIND=activation.kind, BLOCK=BLOCK,
        )  # fmt: skip
    return out_RI


def sigmoid_scaled(x_RH: Tensor, logits_R1: Tensor) -> Tensor:
    """See `expertmesh_kernels.activation.sigmoid_scaled`; rows are contiguous."""
    num_rows, width = x_RH.shape
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    if num_rows:
        _sigmoid_scaled[(num_rows, -(-width // BLOCK))](
            x_RH, logits_R1.contiguous(), out_RH, x_RH.stride(0), width, BLOCK=BLOCK
        )
    return out_RH


def numbers(activation: Activation) -> tuple[float, float]:
    """Alpha and limit as kernels take them: floats, finite."""
    return float(activation.alpha), min(float(activation.limit), 3e38)
