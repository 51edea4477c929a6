"""The FFN of a layer: dense, or a gate and routed experts that live elsewhere.

Both kinds are begun and give their result later, so the forward pass does not ask which one it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.experts import ExpertClient, Finished, Pending
from attention_worker.gate_counts import Choice
from attention_worker.routed_experts import NoRecorder, RoutingRecorder
from expertmesh.model_config import Activation
from expertmesh_kernels.activation import sigmoid_scaled
from expertmesh_kernels.grouped_mlp import ExpertWeights, gated_mlp
from expertmesh_kernels.linear import PackedLinear, linear
from expertmesh_kernels.router import Gate, Routing, choose_experts


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
    dispatch_s: float = 0.0
    """Time spent handing rows to experts so far; those in this process compute them then."""
    wait_s: float = 0.0
    """Time spent waiting for outputs so far."""
    busy_s: float = 0.0
    """Time that the slowest expert worker of each layer computed so far."""
    degraded_slots: set[int] = field(default_factory=set)
    """Request slots with rows that went without an expert."""
    recorder: RoutingRecorder = field(default_factory=NoRecorder)
    """Is told which experts were chosen."""
    choices: list[Choice] = field(default_factory=list)
    """What was chosen so far; of all micro-batches of the step."""

    def dispatch(self, layer: int, h_TH: Tensor, routing: Routing) -> Pending:
        """Sends rows to their experts; the time it takes counts as such.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy.
        """
        started_s = time.monotonic()
        deadline_s = min(started_s + self.timeout_s, self.step_deadline_s)
        pending = self.client.dispatch(layer, h_TH, routing, self.num_generated_rows, deadline_s)
        self.dispatch_s += time.monotonic() - started_s
        return pending

    def chosen(self, layer: int, ids_LTK: npt.NDArray[np.int32]) -> None:
        """Takes note of the experts that gates chose.

        Args:
            layer: Number of the first of L successive MoE layers.
            ids_LTK: Their choices; not changed any more.
        """
        self.choices.append((layer, ids_LTK))
        for topk_ids_TK in ids_LTK:
            self.recorder.record(topk_ids_TK)

    def add_times(self, dispatch_s: float, wait_s: float, busy_s: float) -> None:
        """Counts what calls cost that were made elsewhere."""
        self.dispatch_s += dispatch_s
        self.wait_s += wait_s
        self.busy_s += busy_s

    def wait_for(self, pending: Pending) -> Tensor:
        """The result of a call; the time it took counts as waited for.

        Raises:
            ExpertUnavailableError: Experts did not answer in time.
        """
        started_s = time.monotonic()
        try:
            return pending.result()
        finally:
            self.wait_s += time.monotonic() - started_s
            self.busy_s += pending.busy_s


class FfnResult(Protocol):
    """An FFN that was begun."""

    def result(self) -> Tensor:
        """[T, H]; waits for rows that travel.

        Raises:
            ExpertUnavailableError: Routed experts cannot be reached.
        """
        ...


class Ffn(Protocol):
    """The second half of a decoder layer."""

    def begin(self, h_TH: Tensor, calls: ExpertCalls) -> FfnResult:
        """Computes what it can for rows [T, H], and sends the others on their way.

        Raises:
            ExpertUnavailableError: Routed experts cannot be reached.
        """
        ...


@dataclass(frozen=True)
class DenseFfn:
    """A gated FFN on this device."""

    weights: ExpertWeights
    activation: Activation

    def begin(self, h_TH: Tensor, calls: ExpertCalls) -> FfnResult:
        """All of it; no calls are made."""
        return Finished(gated_mlp(h_TH, self.weights, self.activation))


class SharedExpert(Protocol):
    """An FFN on this device that every row of an MoE layer visits."""

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        ...


@dataclass(frozen=True)
class PlainSharedExpert:
    """A gated FFN."""

    weights: ExpertWeights
    activation: Activation

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return gated_mlp(h_TH, self.weights, self.activation)


@dataclass(frozen=True)
class WeighedSharedExpert:
    """A shared expert times sigmoid(gate(x)), one number per row."""

    expert: PlainSharedExpert
    gate: PackedLinear
    """H -> 1, in FP32."""

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        logits_T1 = linear(h_TH, self.gate, out_dtype=torch.float32)
        return sigmoid_scaled(self.expert(h_TH), logits_T1)


@dataclass(frozen=True)
class MoeFfn:
    """A gate on this device, routed experts wherever the expert client finds them."""

    layer: int
    gate: Gate
    shared: tuple[SharedExpert, ...] = ()
    """Computed while the rows travel."""

    def begin(self, h_TH: Tensor, calls: ExpertCalls) -> FfnResult:
        """The weighted sum over each row's experts, plus the shared experts."""
        routing = choose_experts(h_TH, self.gate)
        calls.chosen(self.layer, routing.topk_ids_TK[np.newaxis])
        pending = calls.dispatch(self.layer, h_TH, routing)
        return _MoeResult(pending, calls, [expert(h_TH) for expert in self.shared])


@dataclass(frozen=True)
class _MoeResult:
    """Rows that travel, and what the shared experts made of them meanwhile."""

    pending: Pending
    calls: ExpertCalls
    shared: list[Tensor]

    def result(self) -> Tensor:
        """[T, H]; see FfnResult."""
        out_TH = self.calls.wait_for(self.pending)
        for shared_TH in self.shared:
            out_TH = out_TH + shared_TH
        return out_TH
