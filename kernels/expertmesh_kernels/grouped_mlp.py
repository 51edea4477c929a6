"""Gated FFNs: one for all rows, or an expert for each (row, expert) pair.

R rows, H hidden size, I intermediate size, N pairs. A pair's result depends on its row and its
expert alone: each is computed by the chains of `linear`, whatever else is in the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.activation import cpu_arguments, gated_activation_reference
from expertmesh_kernels.cpu.mlp import gated_mlp as cpu_gated_mlp
from expertmesh_kernels.host import as_array, as_input
from expertmesh_kernels.linear import PackedLinear, linear_reference


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one gated FFN."""

    gate_up: PackedLinear
    """H -> 2I, gate first."""
    down: PackedLinear
    """I -> H."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.gate_up.nbytes + self.down.nbytes


def gated_mlp(x_RH: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """down(act(gate(x), up(x))), [R, H], in the dtype of x.

    FP32 inside; rounded to the dtype of x after the activation, and at the end.
    """
    if x_RH.device.type != "cpu":
        return gated_mlp_reference(x_RH, weights, activation)
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    rows_R = np.arange(x_RH.shape[0], dtype=np.int64)
    _run_cpu(as_array(x_RH), rows_R, weights, activation, as_array(out_RH), rows_R)
    return out_RH


def grouped_mlp(
    x_RH: Tensor,
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
    experts: Mapping[int, ExpertWeights],
    activation: Activation,
) -> Tensor:
    """Each pair's expert applied to its row, [N, H], in pair order and the dtype of x.

    Args:
        x_RH: Rows; a row may occur in several pairs or in none.
        row_of_pair_N: Row of each pair.
        expert_of_pair_N: Expert of each pair, in any order; each a key of `experts`.
        experts: Weights by expert id.
        activation: See `gated_activation`.
    """
    if x_RH.device.type != "cpu":
        return grouped_mlp_reference(x_RH, row_of_pair_N, expert_of_pair_N, experts, activation)
    out_NH = x_RH.new_empty(len(row_of_pair_N), x_RH.shape[1])
    x, out = as_array(x_RH), as_array(out_NH)
    row_of_pair_N = as_input(row_of_pair_N, np.int64)
    for expert, pairs in _pairs_by_expert(expert_of_pair_N):
        _run_cpu(x, row_of_pair_N[pairs], experts[expert], activation, out, pairs)
    return out_NH


def _pairs_by_expert(expert_of_pair_N: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """The pairs of each expert that occurs, in ascending order."""
    experts = np.unique(expert_of_pair_N).tolist()
    return [(expert, np.flatnonzero(expert_of_pair_N == expert)) for expert in experts]


def _run_cpu(
    x: NDArray[np.generic],
    rows: NDArray[np.int64],
    weights: ExpertWeights,
    activation: Activation,
    out: NDArray[np.generic],
    out_rows: NDArray[np.int64],
) -> None:
    gate_up, down = weights.gate_up, weights.down
    if x.shape[1] != gate_up.in_features:
        raise ValueError(f"x has {x.shape[1]} features, expected {gate_up.in_features}")
    cpu_gated_mlp(
        x, rows, gate_up.panels, gate_up.bias, down.panels, down.bias, down.in_features,
        *cpu_arguments(activation), out, out_rows,
    )  # fmt: skip


def gated_mlp_reference(x_RH: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """What `gated_mlp` computes, in PyTorch."""
    gate_up_R2I = linear_reference(x_RH, weights.gate_up, out_dtype=torch.float32)
    act_RI = gated_activation_reference(gate_up_R2I, activation).to(x_RH.dtype)
    return linear_reference(act_RI, weights.down)


def grouped_mlp_reference(
    x_RH: Tensor,
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
    experts: Mapping[int, ExpertWeights],
    activation: Activation,
) -> Tensor:
    """What `grouped_mlp` computes, in PyTorch."""
    out_NH = x_RH.new_empty(len(row_of_pair_N), x_RH.shape[1])
    for expert, pairs in _pairs_by_expert(expert_of_pair_N):
        rows = torch.from_numpy(row_of_pair_N[pairs]).to(x_RH.device)
        result = gated_mlp_reference(x_RH[rows], experts[expert], activation)
        out_NH[torch.from_numpy(pairs).to(x_RH.device)] = result
    return out_NH
