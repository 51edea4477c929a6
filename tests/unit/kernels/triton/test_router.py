"""The gate's choice in Triton: against the reference, for all equations and special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertmesh.model_config import GateConfig
from expertmesh_kernels.router import Routing, route_reference
from expertmesh_kernels.triton import router
from expertmesh_kernels.triton.order import order_by_expert
from expertmesh_kernels.triton.router import DeviceRouting, route, route_rows
from tests.support.poison import poisoned
from tests.unit.kernels.triton.test_small import random

GATES = {
    "softmax": GateConfig(16, 4),
    "odd, not normalised": GateConfig(5, 3, renormalize=False, scale=2.0),
    "groups": GateConfig(24, 4, renormalize=False, scale=16.0, num_groups=6, top_groups=2),
    "deepseek_v3": GateConfig(
        16,
        4,
        scoring="sigmoid",
        renormalize_eps=1e-20,
        scale=2.5,
        selection_bias=True,
        num_groups=4,
        top_groups=2,
        group_score="top2_sum",
    ),
    "softmax, best two of groups": GateConfig(
        12, 3, num_groups=2, top_groups=1, group_score="top2_sum"
    ),
    "all of them": GateConfig(8, 8, scoring="sigmoid"),
    "one": GateConfig(3, 1, bias=True),
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 20.0, 30.0, -20.0, -100.0, 3e38, -3e38]


def make_bias(gate: GateConfig) -> NDArray[np.float32] | None:
    """A selection bias of both signs, if the gate has one."""
    rng = np.random.default_rng(1)
    return rng.normal(size=gate.num_experts).astype(np.float32) if gate.selection_bias else None


def check(actual: DeviceRouting, expected: Routing) -> None:
    """The same experts in the same order, with the same weights."""
    np.testing.assert_array_equal(actual.topk_ids_TK.cpu().numpy(), expected.topk_ids_TK)
    weights = actual.topk_weights_TK.cpu().numpy()
    np.testing.assert_allclose(weights, expected.topk_weights_TK, rtol=3e-5, atol=1e-6)
    assert actual.counts_E.dtype == torch.int32
    np.testing.assert_array_equal(actual.counts_E.cpu().numpy(), expected.counts_E)
    num_experts = len(expected.counts_E)
    order = order_by_expert(actual.topk_ids_TK.flatten(), num_experts, 1, actual.counts_E)
    np.testing.assert_array_equal(
        order.pairs.cpu().numpy()[: expected.order_N.size], expected.order_N
    )


@pytest.mark.parametrize("name", GATES)
def test_routing_is_that_of_the_reference(name: str, device: torch.device) -> None:
    """Random and special logits: ties, NaN, infinities, all alike, all negative."""
    gate, rng = GATES[name], np.random.default_rng(0)
    logits = rng.normal(size=(24, gate.num_experts)) * 3
    logits[8:] = rng.choice(SPECIAL, size=(16, gate.num_experts))
    logits[:4] = np.array([[-1], [-np.inf], [np.nan], [0]])
    logits[4] = logits[4].round()
    logits_TE, bias_E = torch.from_numpy(logits.astype(np.float32)), make_bias(gate)
    bias = None if bias_E is None else poisoned(torch.from_numpy(bias_E).to(device))
    actual = route(poisoned(logits_TE.to(device)), gate, bias)
    check(actual, route_reference(logits_TE, gate, bias_E))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "one"])
def test_the_projection_may_be_part_of_it(
    name: str, small: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in bfloat16, weights in FP32, in one kernel or in two; alone or among others."""
    monkeypatch.setattr(router, "_SMALL_GATE", 1 << 20 if small else 0)
    gate = GATES[name]
    x_TH, weight_HE = random(19, 40).bfloat16(), random(40, gate.num_experts, seed=1)
    gate_bias_E = random(gate.num_experts, seed=2) if gate.bias else None
    bias_E = make_bias(gate)
    x, weight = poisoned(x_TH.to(device)), weight_HE.to(device)
    biases = [
        None if gate_bias_E is None else gate_bias_E.to(device),
        None if bias_E is None else torch.from_numpy(bias_E).to(device),
    ]
    logits_TE = x_TH.float() @ weight_HE
    logits_TE = logits_TE if gate_bias_E is None else logits_TE + gate_bias_E
    together = route_rows(x, weight, gate, *biases)
    check(together, route_reference(logits_TE, gate, bias_E))
    alone = route_rows(x[17:18], weight, gate, *biases)
    assert torch.equal(alone.topk_weights_TK, together.topk_weights_TK[17:18])
    assert torch.equal(alone.topk_ids_TK, together.topk_ids_TK[17:18])


@pytest.mark.parametrize("block_m", [1, 4])
def test_pairs_are_sorted_by_expert(block_m: int, device: torch.device) -> None:
    """Stable, padded to blocks, counted; experts without pairs and pairs of nobody."""
    experts_N = np.random.default_rng(0).integers(-1, 6, 41)
    experts_N[experts_N == 4] = 5
    order = order_by_expert(torch.from_numpy(experts_N).int().to(device), 6, block_m)
    expected, owners = [], []
    for expert in range(6):
        own = np.flatnonzero(experts_N == expert).tolist()
        own += [41] * (-len(own) % block_m)
        expected += own
        owners += [expert] * (len(own) // block_m)
    num_blocks = len(order.expert_of_block)
    expected += [41] * (num_blocks * block_m - len(expected))
    assert order.pairs.tolist() == expected
    assert order.expert_of_block.tolist() == owners + [-1] * (num_blocks - len(owners))
    assert order.counts_E.tolist() == [int((experts_N == expert).sum()) for expert in range(6)]


@pytest.mark.parametrize("num_pairs", [1, 3, 50])
def test_blocks_suffice_for_the_worst_distribution(num_pairs: int, device: torch.device) -> None:
    """All experts have one pair, but for one which has the others; or one has all."""
    spread = torch.arange(num_pairs).clamp(max=3)
    for experts_N in (spread, torch.full((num_pairs,), 2)):
        order = order_by_expert(experts_N.int().to(device), 4, 8)
        assert sorted(order.pairs.tolist())[:num_pairs] == list(range(num_pairs))
