"""The FFN of a layer: dense, or a gate and routed experts that live elsewhere.

Both kinds have one call, so the forward pass does not ask which one a layer has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from attention_worker.experts import ExpertClient
from attention_worker.routed_experts import NoRecorder, RoutingRecorder
from expertmesh.model_config import Activation, GateConfig
from expertmesh_kernels.grouped_mlp import ExpertWeights, gated_mlp
from expertmesh_kernels.linear import PackedLinear, linear
from expertmesh_kernels.router import route


@dataclass
class ExpertCalls:
    """How the MoE layers of one step reach their experts, and what that cost."""

    client: ExpertClient
    timeout_s: float
    """Longest time of one layer's call."""
    step_deadline_s: float = float("inf")
    """End of the step on the monotonic clock."""
    num_generated_rows: int = 0
    """Token class: rows [0, num_generated_rows) are generated tokens."""
    wait_s: float = 0.0
    """Time spent waiting for outputs so far."""
    recorder: RoutingRecorder = field(default_factory=NoRecorder)
    """Is told which experts were chosen."""

    def deadline_s(self) -> float:
        """Deadline of a call that starts now, on the monotonic clock."""
        return min(time.monotonic() + self.timeout_s, self.step_deadline_s)


class Ffn(Protocol):
    """The second half of a decoder layer."""

    def __call__(self, h_TH: Tensor, calls: ExpertCalls) -> Tensor:
        """[T, H] -> [T, H]. Raises ExpertUnavailableError if routed experts cannot be reached."""
        ...


@dataclass(frozen=True)
class DenseFfn:
    """A gated FFN on this device."""

    weights: ExpertWeights
    activation: Activation

    def __call__(self, h_TH: Tensor, calls: ExpertCalls) -> Tensor:
        """[T, H] -> [T, H]; no calls are made."""
        return gated_mlp(h_TH, self.weights, self.activation)


@dataclass(frozen=True)
class MoeFfn:
    """A gate on this device, routed experts wherever the expert client finds them."""

    layer: int
    gate: PackedLinear
    """H -> E; its logits are FP32."""
    config: GateConfig

    def __call__(self, h_TH: Tensor, calls: ExpertCalls) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum over each row's experts."""
        logits_TE = linear(h_TH, self.gate, out_dtype=torch.float32)
        routing = route(logits_TE, self.config)
        calls.recorder.record(routing.topk_ids_TK)
        pending = calls.client.dispatch(
            self.layer, h_TH, routing, calls.num_generated_rows, calls.deadline_s()
        )
        # Rows travel from here on: a shared expert is computed between these two lines.
        started_s = time.monotonic()
        try:
            return pending.result()
        finally:
            calls.wait_s += time.monotonic() - started_s
