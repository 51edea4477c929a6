"""The ops' arguments on their way to Triton kernels: against the references of the ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.model_config import SILU, GateConfig, RopeConfig
from expertmesh_kernels.combine import combine_reference
from expertmesh_kernels.grouped_mlp import (
    ExpertTable,
    ExpertWeights,
    gated_mlp_reference,
    grouped_mlp_reference,
)
from expertmesh_kernels.heads import PackedHeads, head_linear_reference
from expertmesh_kernels.linear import PackedLinear, linear_reference
from expertmesh_kernels.rope import apply_rope_reference, rope_table
from expertmesh_kernels.router import Gate, route_reference
from expertmesh_kernels.triton import ops
from tests.unit.kernels.triton.test_small import random


def packed(columns: int, depth: int, device: torch.device, seed: int) -> PackedLinear:
    """A weight as it is packed for a device: one panel."""
    weight = (random(depth, columns, seed=seed) / depth**0.5).to(device)
    bias_N = random(columns, seed=seed + 1).to(device)
    return PackedLinear(weight[None], "panels", bias_N, depth, columns, paired=False)


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding."""
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


def test_products_and_experts(device: torch.device) -> None:
    """With tables that have gaps; what a table does not have is refused."""
    x_RH = random(4, 24).to(device)
    weight = packed(20, 24, device, seed=1)
    close(ops.run_linear(x_RH, weight, None), linear_reference(x_RH, weight))
    heads = PackedHeads(random(3, 1, 8, 5, seed=2).to(device), 5)
    x_TnK = x_RH.view(4, 3, 8)
    close(ops.run_head_linear(x_TnK, heads), head_linear_reference(x_TnK, heads))
    experts = {
        expert: ExpertWeights(
            packed(32, 24, device, seed=10 * expert), packed(24, 16, device, seed=10 * expert + 5)
        )
        for expert in (1, 4)
    }
    table = ExpertTable(experts)
    rows, owners = np.array([0, 3, 3, 1]), np.array([4, 1, 4, 4])
    expected = grouped_mlp_reference(x_RH, rows, owners, table, SILU)
    close(ops.run_grouped_mlp(x_RH, rows, owners, table, SILU), expected)
    actual = ops.run_gated_mlp(x_RH, experts[4].alone, SILU)
    close(actual, gated_mlp_reference(x_RH, experts[4], SILU))
    with pytest.raises(KeyError, match=r"experts \[0, 2\]"):
        ops.run_grouped_mlp(x_RH, rows, np.array([4, 0, 1, 2]), table, SILU)
    paired = PackedLinear(weight.weight, "panels", None, 24, 20, paired=True)
    with pytest.raises(ValueError, match="packed in panels for the CPU"):
        ops.run_linear(x_RH, paired, None)


def test_routing_rope_and_combine(device: torch.device) -> None:
    """Indices and weights come as host arrays, and results of the gate go back as such."""
    logits_TE, gate = random(5, 6), GateConfig(6, 2, scoring="sigmoid", selection_bias=True)
    bias_E = random(6, seed=1).numpy()
    ids_TK, weights_TK = ops.run_route(logits_TE.to(device), gate, bias_E)
    expected = route_reference(logits_TE, gate, bias_E)
    np.testing.assert_array_equal(ids_TK, expected.topk_ids_TK)
    np.testing.assert_allclose(weights_TK, expected.topk_weights_TK, rtol=1e-5)
    weight_HE = random(12, 6, seed=4).to(device)
    layer = PackedLinear(weight_HE[None], "panels", None, 12, 6, paired=False)
    h_TH = random(5, 12, seed=5).to(device)
    chosen = ops.run_choose_experts(h_TH, Gate(layer, gate, bias_E))
    expected = route_reference((h_TH @ weight_HE).cpu(), gate, bias_E)
    np.testing.assert_array_equal(chosen[0], expected.topk_ids_TK)
    np.testing.assert_allclose(chosen[1], expected.topk_weights_TK, rtol=1e-5)
    outputs_SH = random(10, 12, seed=2)
    actual = ops.run_combine(outputs_SH.to(device), weights_TK)
    close(actual, combine_reference(outputs_SH, weights_TK))
    table, positions_T = rope_table(RopeConfig(theta=1e4, dim=8), 9), np.array([3, 8], np.int32)
    x_TnD = random(2, 3, 8, seed=3)
    rotated = x_TnD.to(device, copy=True)
    apply_rope_reference(x_TnD, positions_T, table)
    ops.run_rope(rotated, positions_T, table)
    close(rotated, x_TnD)
