"""Gated FFNs: one for all rows, or an expert for each (row, expert) pair.

R rows, H hidden size, I intermediate size, N pairs. A pair's result depends on its row and its
expert alone: each is computed as `linear` does it, whatever else is in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.formats.coded import CodedMatrix
from expertmesh.model_config import Activation
from expertmesh_kernels.activation import cpu_arguments, gated_activation_reference
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu.mlp import (
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    NUM_PARTS,
)
from expertmesh_kernels.cpu.mlp import combined_mlp as cpu_combined_mlp
from expertmesh_kernels.cpu.mlp import grouped_mlp as cpu_grouped_mlp
from expertmesh_kernels.host import LIKE, as_input
from expertmesh_kernels.linear import (
    Format,
    PackedLinear,
    linear_reference,
    pack_coded_linear,
    pack_linear,
)
from expertmesh_kernels.router import Routing

if TYPE_CHECKING:
    from expertmesh_kernels.triton.grouped_mlp import MlpTables


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one gated FFN. Made by `pack_expert`."""

    gate_up: PackedLinear
    """H -> 2I, gate first."""
    down: PackedLinear
    """I -> H."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.gate_up.nbytes + self.down.nbytes

    @cached_property
    def alone(self) -> ExpertTable:
        """A table of this FFN as expert 0."""
        return ExpertTable({0: self})


def pack_expert(
    gate_up_2IH: Tensor,
    down_HI: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    format: Format | None = None,
) -> ExpertWeights:
    """Reorder the weights of an expert; see `pack_linear`."""
    return ExpertWeights(
        gate_up=pack_linear(gate_up_2IH, gate_up_bias, paired=True, format=format),
        down=pack_linear(down_HI, down_bias, format=format),
    )


def pack_coded_expert(
    gate_up_2IH: CodedMatrix,
    down_HI: CodedMatrix,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    format: Format | None = None,
) -> ExpertWeights:
    """Reorder the weights of an expert, which stay quantised; see `pack_coded_linear`.

    Raises:
        ValueError: The two are not quantised alike, or not as any kernel takes it.
    """
    weights = ExpertWeights(
        gate_up=pack_coded_linear(
            gate_up_2IH, gate_up_bias, dtype=dtype, paired=True, format=format
        ),
        down=pack_coded_linear(down_HI, down_bias, dtype=dtype, format=format),
    )
    if weights.gate_up.codes != weights.down.codes:
        raise ValueError(f"{weights.gate_up.codes} beside {weights.down.codes}, expected the same")
    return weights


class ExpertTable(Mapping[int, ExpertWeights]):
    """Experts of one layer by id, and where a kernel finds their weights. Immutable.

    Args:
        experts: All of the same shapes and format; ids from 0.
    """

    def __init__(self, experts: Mapping[int, ExpertWeights]) -> None:
        self._experts = dict(experts)
        size = max(self._experts, default=-1) + 1
        self.is_there_E: NDArray[np.bool_] = np.zeros(size, np.bool_)
        """Which ids the table has, [largest id + 1]."""
        self.is_there_E[list(self._experts)] = True

    def __getitem__(self, expert: int) -> ExpertWeights:
        return self._experts[expert]

    def __iter__(self) -> Iterator[int]:
        return iter(self._experts)

    def __len__(self) -> int:
        return len(self._experts)

    def missing(self, experts_N: NDArray[np.int64]) -> list[int]:
        """Those of some ids, >= 0, that the table does not have; ascending."""
        size = len(self.is_there_E)
        if not len(experts_N) or (experts_N.max() < size and self.is_there_E[experts_N].all()):
            return []
        return [expert for expert in np.unique(experts_N).tolist() if expert not in self]

    @cached_property
    def any_expert(self) -> ExpertWeights:
        """One of them, for what all have in common."""
        return next(iter(self._experts.values()))

    @cached_property
    def addresses_EA(self) -> NDArray[np.int64]:
        """Addresses on the host of what CPU kernels read, [largest id + 1, parts]."""
        table_EA = np.zeros((len(self.is_there_E), NUM_PARTS), np.int64)
        for expert, weights in self._experts.items():
            for part, layer in ((GATE_UP, weights.gate_up), (DOWN, weights.down)):
                table_EA[expert, part] = layer.panels.ctypes.data
            for part, layer in ((GATE_UP_BIAS, weights.gate_up), (DOWN_BIAS, weights.down)):
                table_EA[expert, part] = layer.bias.ctypes.data if layer.bias.size else 0
        return table_EA

    @cached_property
    def on_device(self) -> MlpTables:
        """Where Triton kernels find the weights."""
        from expertmesh_kernels.triton import ops

        return ops.mlp_tables(self)

    @cached_property
    def like(self) -> NDArray[np.generic]:
        """See `PackedLinear.like`."""
        return self.any_expert.down.like


def gated_mlp(x_RH: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """down(act(gate(x), up(x))), [R, H], in the dtype of x.

    FP32 inside; rounded to the dtype of x after the activation, and at the end.
    """
    if x_RH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_gated_mlp(x_RH, weights.alone, activation)
    if x_RH.device.type != "cpu":
        return gated_mlp_reference(x_RH, weights, activation)
    num_rows = x_RH.shape[0]
    rows_R = np.arange(num_rows, dtype=np.int64)
    return grouped_mlp(x_RH, rows_R, np.zeros(num_rows, np.int64), weights.alone, activation)


def grouped_mlp(
    x_RH: Tensor,
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
    experts: ExpertTable,
    activation: Activation,
) -> Tensor:
    """Each pair's expert applied to its row, [N, H], in pair order and the dtype of x.

    Args:
        x_RH: Rows; a row may occur in several pairs or in none.
        row_of_pair_N: Row of each pair.
        expert_of_pair_N: Expert of each pair, in any order.
        experts: Weights.
        activation: See `gated_activation`.

    Raises:
        KeyError: A pair's expert is not in the table.
    """
    if x_RH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_grouped_mlp(x_RH, row_of_pair_N, expert_of_pair_N, experts, activation)
    if x_RH.device.type != "cpu":
        return grouped_mlp_reference(x_RH, row_of_pair_N, expert_of_pair_N, experts, activation)
    out_NH = x_RH.new_empty(len(row_of_pair_N), x_RH.shape[1])
    if not len(row_of_pair_N):
        return out_NH
    if not experts:
        raise KeyError("the table has no experts")
    weights = experts.any_expert
    _check(x_RH, weights)
    x_RH = x_RH.contiguous()
    wrong_pair = cpu_grouped_mlp(
        x_RH.data_ptr(), (x_RH.shape[0], x_RH.shape[1]), LIKE[x_RH.dtype],
        as_input(row_of_pair_N, np.int64), as_input(expert_of_pair_N, np.int64),
        experts.addresses_EA, experts.like, weights.down.in_features, *cpu_arguments(activation),
        out_NH.data_ptr(),
    )  # fmt: skip
    if wrong_pair >= 0:
        raise KeyError(f"expert {expert_of_pair_N[wrong_pair]} is not in the table")
    return out_NH


def combined_mlp(
    h_TH: Tensor, routing: Routing, experts: ExpertTable, activation: Activation
) -> Tensor:
    """The weighted sum over each row's experts, [T, H]: `grouped_mlp` and `combine` in one.

    Args:
        h_TH: Hidden states.
        routing: Experts and weights of each row.
        experts: Weights.
        activation: See `gated_activation`.

    Raises:
        KeyError: An expert is not in the table.
    """
    num_rows, top_k = routing.topk_ids_TK.shape
    if h_TH.device.type != "cpu" or not num_rows:
        rows_N = np.repeat(np.arange(num_rows), top_k)
        experts_N = routing.topk_ids_TK.reshape(-1).astype(np.int64)
        outputs_SH = grouped_mlp(h_TH, rows_N, experts_N, experts, activation)
        return combine(outputs_SH, routing.topk_weights_TK)
    weights = experts.any_expert
    _check(h_TH, weights)
    h_TH = h_TH.contiguous()
    out_TH = torch.empty_like(h_TH)
    wrong_pair = cpu_combined_mlp(
        h_TH.data_ptr(), (num_rows, h_TH.shape[1]), LIKE[h_TH.dtype], routing.topk_weights_TK,
        routing.counts_E, routing.order_N, experts.addresses_EA, experts.like,
        weights.down.in_features, *cpu_arguments(activation), out_TH.data_ptr(),
    )  # fmt: skip
    if wrong_pair >= 0:
        raise KeyError(f"expert {routing.topk_ids_TK.flat[wrong_pair]} is not in the table")
    return out_TH


def _check(x_RH: Tensor, weights: ExpertWeights) -> None:
    gate_up = weights.gate_up
    if x_RH.shape[1] != gate_up.in_features:
        raise ValueError(f"x has {x_RH.shape[1]} features, expected {gate_up.in_features}")
    if gate_up.format == "tiles" and x_RH.dtype != torch.bfloat16:
        raise ValueError(f"x is {x_RH.dtype}, expected torch.bfloat16 as the weights are in tiles")


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
    for expert in np.unique(expert_of_pair_N).tolist():
        pairs = np.flatnonzero(expert_of_pair_N == expert)
        rows = torch.from_numpy(row_of_pair_N[pairs]).to(x_RH.device)
        result = gated_mlp_reference(x_RH[rows], experts[expert], activation)
        out_NH[torch.from_numpy(pairs).to(x_RH.device)] = result
    return out_NH
