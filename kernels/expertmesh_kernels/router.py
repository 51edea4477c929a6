"""From the gate's logits to experts and weights. T tokens, E experts, K top-k."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import GateConfig
from expertmesh_kernels.cpu.router import softmax_topk
from expertmesh_kernels.host import as_array


@dataclass(frozen=True)
class Routing:
    """The experts chosen for each token, by descending weight; ties to the lowest id."""

    topk_ids_TK: NDArray[np.int32]
    topk_weights_TK: NDArray[np.float32]


def route(logits_TE: Tensor, gate: GateConfig) -> Routing:
    """Choose K different experts for each token.

    A NaN logit counts as -inf. A row without a finite maximum gets equal weights.

    Args:
        logits_TE: float32.
        gate: The gate's equation.
    """
    _check(logits_TE, gate)
    if logits_TE.device.type != "cpu":
        return route_reference(logits_TE, gate)
    shape = (logits_TE.shape[0], gate.top_k)
    routing = Routing(np.empty(shape, np.int32), np.empty(shape, np.float32))
    softmax_topk(
        as_array(logits_TE), gate.renormalize, routing.topk_ids_TK, routing.topk_weights_TK
    )
    return routing


def route_reference(logits_TE: Tensor, gate: GateConfig) -> Routing:
    """What `route` computes, in PyTorch."""
    _check(logits_TE, gate)
    safe_TE = torch.where(logits_TE.isnan(), -torch.inf, logits_TE)
    order_TE = torch.sort(safe_TE, dim=-1, descending=True, stable=True)
    ids_TK = order_TE.indices[:, : gate.top_k]
    weights_TK = torch.softmax(safe_TE, dim=-1).gather(1, ids_TK)
    if gate.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    is_defined_T1 = order_TE.values[:, :1].isfinite()
    weights_TK = torch.where(is_defined_T1, weights_TK, 1.0 / gate.top_k)
    return Routing(ids_TK.int().cpu().numpy(), weights_TK.cpu().numpy())


def _check(logits_TE: Tensor, gate: GateConfig) -> None:
    if logits_TE.dtype != torch.float32 or logits_TE.shape[1:] != (gate.num_experts,):
        raise ValueError(
            f"logits are {logits_TE.dtype} {tuple(logits_TE.shape)}, "
            f"expected float32 [T, {gate.num_experts}]"
        )
    if gate.scoring != "softmax":
        raise ValueError(f"gate scoring is {gate.scoring!r}, expected 'softmax'")
