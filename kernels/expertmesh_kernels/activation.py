"""Gated activations. R rows, I intermediate size, H hidden size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.cpu import activation as cpu
from expertmesh_kernels.host import as_array

_KINDS = {
    "silu": cpu.SILU,
    "gelu_tanh": cpu.GELU_TANH,
    "clamped_swiglu": cpu.CLAMPED_SWIGLU,
}


def gated_activation(gate_up_R2I: Tensor, activation: Activation) -> Tensor:
    """act(gate, up), [R, I]: computed in FP32, rounded once to the input's dtype.

    Args:
        gate_up_R2I: Gate in the first I columns, up in the rest.
        activation: Which one; `Activation` has the equations.
    """
    if gate_up_R2I.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.gated_activation(gate_up_R2I, activation)
    if gate_up_R2I.device.type != "cpu":
        return gated_activation_reference(gate_up_R2I, activation)
    num_rows, width = gate_up_R2I.shape
    out_RI = gate_up_R2I.new_empty(num_rows, width // 2)
    cpu.gated_activation(as_array(gate_up_R2I), *cpu_arguments(activation), as_array(out_RI))
    return out_RI


def gated_activation_reference(gate_up_R2I: Tensor, activation: Activation) -> Tensor:
    """What `gated_activation` computes, in PyTorch."""
    gate_RI, up_RI = gate_up_R2I.float().chunk(2, dim=-1)
    return _reference(gate_RI, up_RI, activation).to(gate_up_R2I.dtype)


def _reference(gate_RI: Tensor, up_RI: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "silu":
        return torch.nn.functional.silu(gate_RI) * up_RI
    if activation.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate_RI, approximate="tanh") * up_RI
    gate_RI = gate_RI.clamp(max=activation.limit)
    up_RI = up_RI.clamp(-activation.limit, activation.limit)
    return (up_RI + 1) * gate_RI * torch.sigmoid(activation.alpha * gate_RI)


def sigmoid_scaled(x_RH: Tensor, logits_R1: Tensor) -> Tensor:
    """x * sigmoid(logit), a logit per row, [R, H]: in FP32, rounded once to the dtype of x.

    Args:
        x_RH: Any floating dtype.
        logits_R1: float32.
    """
    if logits_R1.shape != (len(x_RH), 1) or logits_R1.dtype != torch.float32:
        raise ValueError(
            f"logits are {logits_R1.dtype} {tuple(logits_R1.shape)}, "
            f"expected float32 [{len(x_RH)}, 1]"
        )
    if x_RH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.sigmoid_scaled(x_RH, logits_R1)
    if x_RH.device.type != "cpu":
        return sigmoid_scaled_reference(x_RH, logits_R1)
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    cpu.sigmoid_scaled(as_array(x_RH), as_array(logits_R1).reshape(-1), as_array(out_RH))
    return out_RH


def sigmoid_scaled_reference(x_RH: Tensor, logits_R1: Tensor) -> Tensor:
    """What `sigmoid_scaled` computes, in PyTorch."""
    return (x_RH.float() * torch.sigmoid(logits_R1)).to(x_RH.dtype)


def cpu_arguments(activation: Activation) -> tuple[int, np.float32, np.float32]:
    """What CPU kernels take: kind, alpha and limit."""
    kind = _KINDS.get(activation.kind)
    if kind is None:
        raise ValueError(f"activation is {activation.kind!r}, expected one of {sorted(_KINDS)}")
    return kind, np.float32(activation.alpha), np.float32(activation.limit)
