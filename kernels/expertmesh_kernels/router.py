"""From the gate's logits to experts and weights. T tokens, E experts, K top-k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import GateConfig
from expertmesh_kernels.cpu.by_expert import order_by_expert as cpu_order_by_expert
from expertmesh_kernels.cpu.router import Rules
from expertmesh_kernels.cpu.router import gate_and_route as cpu_gate_and_route
from expertmesh_kernels.cpu.router import route as cpu_route
from expertmesh_kernels.host import LIKE, as_array, as_input
from expertmesh_kernels.linear import PackedLinear, linear

_NO_BIAS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Routing:
    """The experts chosen for each token, best choice first; ties to the lowest id."""

    topk_ids_TK: NDArray[np.int32]
    topk_weights_TK: NDArray[np.float32]
    counts_E: NDArray[np.int64]
    """Slots of each expert."""
    order_N: NDArray[np.int64]
    """Slots, t * K + j, in the order of their experts, ascending within each."""

    @classmethod
    def empty(cls, num_rows: int, top_k: int, num_experts: int) -> Routing:
        """To be filled."""
        shape = (num_rows, top_k)
        return cls(
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty(num_experts, np.int64),
            np.empty(num_rows * top_k, np.int64),
        )

    @classmethod
    def of(
        cls,
        topk_ids_TK: NDArray[np.int32],
        topk_weights_TK: NDArray[np.float32],
        num_experts: int,
    ) -> Routing:
        """A choice that was made already, counted and ordered."""
        counts_E = np.empty(num_experts, np.int64)
        order_N = np.empty(topk_ids_TK.size, np.int64)
        cpu_order_by_expert(topk_ids_TK.reshape(-1), counts_E, order_N)
        return cls(topk_ids_TK, topk_weights_TK, counts_E, order_N)


@dataclass(frozen=True)
class Gate:
    """The gate of an MoE layer.

    Raises:
        ValueError: The parts do not fit each other.
    """

    linear: PackedLinear
    """H -> E, FP32."""
    config: GateConfig
    selection_bias_E: NDArray[np.float32] | None = None
    """Added to the scores for the choice, if the gate has such a bias."""

    def __post_init__(self) -> None:
        weight, num_experts = self.linear.weight, self.linear.out_features
        if weight.dtype != torch.float32 or num_experts != self.config.num_experts:
            raise ValueError(
                f"gate is {weight.dtype} with {num_experts} experts, "
                f"expected float32 with {self.config.num_experts}"
            )
        _check_bias(self.config, self.selection_bias_E)
        _check_groups(self.config)

    @cached_property
    def rules(self) -> Rules:
        """The equation, as the CPU kernel takes it."""
        return _rules(self.config)

    @cached_property
    def bias(self) -> NDArray[np.float32]:
        """The selection bias, as the CPU kernel takes it."""
        return _as_bias(self.selection_bias_E)


def choose_experts(h_TH: Tensor, gate: Gate) -> Routing:
    """Logits in FP32 and `route` of them, in one pass on CPU.

    Args:
        h_TH: Hidden states, any floating dtype.
        gate: On the device of the hidden states.
    """
    if h_TH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return Routing.of(*ops.run_choose_experts(h_TH, gate), gate.config.num_experts)
    if h_TH.device.type != "cpu":
        logits_TE = linear(h_TH, gate.linear, out_dtype=torch.float32)
        return route(logits_TE, gate.config, gate.selection_bias_E)
    if h_TH.shape[1] != gate.linear.in_features:
        raise ValueError(f"x has {h_TH.shape[1]} features, expected {gate.linear.in_features}")
    h_TH = h_TH.contiguous()
    routing = Routing.empty(len(h_TH), gate.config.top_k, gate.config.num_experts)
    cpu_gate_and_route(
        h_TH.data_ptr(), LIKE[h_TH.dtype], gate.linear.panels, gate.linear.bias, gate.rules,
        gate.bias, gate.config.num_experts, routing.topk_ids_TK, routing.topk_weights_TK,
        routing.counts_E, routing.order_N,
    )  # fmt: skip
    return routing


def _rules(gate: GateConfig) -> Rules:
    return (
        gate.scoring == "sigmoid",
        gate.num_groups,
        gate.top_groups,
        gate.group_score == "top2_sum",
        gate.renormalize,
        np.float32(gate.renormalize_eps),
        np.float32(gate.scale),
    )


def _as_bias(selection_bias_E: NDArray[np.float32] | None) -> NDArray[np.float32]:
    return _NO_BIAS if selection_bias_E is None else as_input(selection_bias_E, np.float32)


def route(
    logits_TE: Tensor, gate: GateConfig, selection_bias_E: NDArray[np.float32] | None = None
) -> Routing:
    """Choose K different experts for each token; `GateConfig` has the equation.

    A NaN logit counts as -inf. Where a softmax has no finite maximum, or scores that are to be
    normalised are all 0, the chosen experts share equally.

    Args:
        logits_TE: float32.
        gate: The gate's equation.
        selection_bias_E: Added to the scores for the choice, if the gate has such a bias.
    """
    _check(logits_TE, gate, selection_bias_E)
    if logits_TE.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return Routing.of(*ops.run_route(logits_TE, gate, selection_bias_E), gate.num_experts)
    if logits_TE.device.type != "cpu":
        return route_reference(logits_TE, gate, selection_bias_E)
    routing = Routing.empty(len(logits_TE), gate.top_k, gate.num_experts)
    cpu_route(
        as_array(logits_TE), _rules(gate), _as_bias(selection_bias_E),
        routing.topk_ids_TK, routing.topk_weights_TK, routing.counts_E, routing.order_N,
    )  # fmt: skip
    return routing


def route_reference(
    logits_TE: Tensor, gate: GateConfig, selection_bias_E: NDArray[np.float32] | None = None
) -> Routing:
    """What `route` computes, in PyTorch."""
    _check(logits_TE, gate, selection_bias_E)
    safe_TE = torch.where(logits_TE.isnan(), -torch.inf, logits_TE)
    scores_TE = _scores(safe_TE, gate)
    sums_groups = gate.num_groups > 1 and gate.group_score == "top2_sum"
    by_logits = gate.scoring == "softmax" and selection_bias_E is None and not sums_groups
    choice_TE = safe_TE if by_logits else scores_TE
    if selection_bias_E is not None:
        choice_TE = choice_TE + torch.from_numpy(selection_bias_E).to(logits_TE.device)
    ids_TK = _best(choice_TE, _open_experts(choice_TE, gate))[:, : gate.top_k]
    weights_TK = _weights(scores_TE.gather(1, ids_TK), gate)
    experts_N = ids_TK.flatten()
    counts_E = experts_N.bincount(minlength=gate.num_experts)
    order_N = experts_N.argsort(stable=True)
    return Routing(
        ids_TK.int().cpu().numpy(),
        weights_TK.cpu().numpy(),
        counts_E.cpu().numpy(),
        order_N.cpu().numpy(),
    )


def _scores(safe_TE: Tensor, gate: GateConfig) -> Tensor:
    if gate.scoring == "sigmoid":
        return safe_TE.sigmoid()
    is_defined_T1 = safe_TE.amax(-1, keepdim=True).isfinite()
    return torch.where(is_defined_T1, safe_TE.softmax(-1), 1.0 / gate.top_k)


def _open_experts(choice_TE: Tensor, gate: GateConfig) -> Tensor:
    """Which experts are in the best groups, bool [T, E]."""
    size = gate.num_experts // gate.num_groups
    groups_TGE = choice_TE.view(len(choice_TE), gate.num_groups, size)
    num_summed = 2 if gate.num_groups > 1 and gate.group_score == "top2_sum" else 1
    scores_TG = groups_TGE.topk(num_summed, dim=-1).values.sum(-1)
    best_TG = torch.sort(scores_TG, dim=-1, descending=True, stable=True).indices
    is_open_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    is_open_TG.scatter_(1, best_TG[:, : gate.top_groups], True)
    return is_open_TG.repeat_interleave(groups_TGE.shape[2], dim=1)


def _best(choice_TE: Tensor, is_open_TE: Tensor) -> Tensor:
    """Ids by descending choice, ties to the lowest; those of open groups first."""
    order_TE = torch.sort(choice_TE, dim=-1, descending=True, stable=True).indices
    is_closed_TE = ~is_open_TE.gather(1, order_TE)
    return order_TE.gather(1, torch.sort(is_closed_TE.int(), dim=-1, stable=True).indices)


def _weights(scores_TK: Tensor, gate: GateConfig) -> Tensor:
    if gate.renormalize:
        sums_T1 = scores_TK.sum(-1, keepdim=True) + gate.renormalize_eps
        scores_TK = torch.where(sums_T1 > 0, scores_TK / sums_T1, 1.0 / gate.top_k)
    return scores_TK * gate.scale


def _check(
    logits_TE: Tensor, gate: GateConfig, selection_bias_E: NDArray[np.float32] | None
) -> None:
    num_experts = gate.num_experts
    if logits_TE.dtype != torch.float32 or logits_TE.shape[1:] != (num_experts,):
        raise ValueError(
            f"logits are {logits_TE.dtype} {tuple(logits_TE.shape)}, "
            f"expected float32 [T, {num_experts}]"
        )
    _check_bias(gate, selection_bias_E)
    _check_groups(gate)


def _check_bias(gate: GateConfig, selection_bias_E: NDArray[np.float32] | None) -> None:
    expected = (gate.num_experts,) if gate.selection_bias else None
    actual = None if selection_bias_E is None else selection_bias_E.shape
    if actual != expected:
        raise ValueError(f"selection bias has shape {actual}, expected {expected}")


def _check_groups(gate: GateConfig) -> None:
    """The best groups must have K experts, and as many as their score is the sum of."""
    size, rest = divmod(gate.num_experts, gate.num_groups)
    least = 2 if gate.num_groups > 1 and gate.group_score == "top2_sum" else 1
    if rest or size < least or not 1 <= gate.top_groups <= gate.num_groups:
        raise ValueError(
            f"{gate.num_experts} experts cannot be chosen from {gate.top_groups} of "
            f"{gate.num_groups} groups by {gate.group_score}"
        )
    if not 1 <= gate.top_k <= gate.top_groups * size:
        raise ValueError(
            f"top_k is {gate.top_k}, {gate.top_groups} groups have {size} experts each"
        )
