"""Gated activations. R rows, I intermediate size."""

from __future__ import annotations

import torch
from torch import Tensor

from expertmesh.model_config import SILU, Activation
from expertmesh_kernels.cpu.mlp import silu_times
from expertmesh_kernels.host import as_array


def gated_activation(gate_up_R2I: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, [R, I]: computed in FP32, rounded once to the input's dtype.

    Args:
        gate_up_R2I: Gate in the first I columns, up in the rest.
        activation: Only "silu" so far: x / (1 + exp(-x)).
    """
    check_activation(activation)
    if gate_up_R2I.device.type != "cpu":
        return gated_activation_reference(gate_up_R2I, activation)
    num_rows, width = gate_up_R2I.shape
    out_RI = gate_up_R2I.new_empty(num_rows, width // 2)
    silu_times(as_array(gate_up_R2I), as_array(out_RI))
    return out_RI


def gated_activation_reference(gate_up_R2I: Tensor, activation: Activation) -> Tensor:
    """What `gated_activation` computes, in PyTorch."""
    check_activation(activation)
    gate_RI, up_RI = gate_up_R2I.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_RI) * up_RI).to(gate_up_R2I.dtype)


def check_activation(activation: Activation) -> None:
    """Raise ValueError for an activation without a kernel."""
    if activation != SILU:
        raise ValueError(f"activation is {activation.kind!r}, expected 'silu'")
