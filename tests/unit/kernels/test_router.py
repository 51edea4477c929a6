"""The gate's choice: against transformers, against the reference, and its properties."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from expertmesh.model_config import GateConfig
from expertmesh_kernels.linear import linear, pack_linear
from expertmesh_kernels.router import Gate, Routing, choose_experts, route, route_reference

SOFTMAX = GateConfig(16, 4)
DEEPSEEK_V2 = GateConfig(16, 4, renormalize=False, scale=16.0, num_groups=4, top_groups=2)
DEEPSEEK_V3 = GateConfig(
    16,
    4,
    scoring="sigmoid",
    renormalize_eps=1e-20,
    scale=2.5,
    selection_bias=True,
    num_groups=4,
    top_groups=2,
    group_score="top2_sum",
)
FAMILIES: dict[str, tuple[type[nn.Module], GateConfig]] = {
    "mixtral": (MixtralTopKRouter, SOFTMAX),
    "qwen2_moe": (Qwen2MoeTopKRouter, replace(SOFTMAX, renormalize=False)),
    "qwen3_moe": (Qwen3MoeTopKRouter, SOFTMAX),
    "olmoe": (OlmoeTopKRouter, replace(SOFTMAX, renormalize=False)),
    "gpt_oss": (GptOssTopKRouter, SOFTMAX),
    "deepseek_v2": (DeepseekV2TopkRouter, DEEPSEEK_V2),
    "deepseek_v2 greedy": (DeepseekV2TopkRouter, replace(DEEPSEEK_V2, num_groups=1, top_groups=1)),
    "deepseek_v3": (DeepseekV3TopkRouter, DEEPSEEK_V3),
    "deepseek_v3, weights as they are": (
        DeepseekV3TopkRouter,
        replace(DEEPSEEK_V3, renormalize=False),
    ),
    "mimo_v2_flash": (MiMoV2FlashTopkRouter, replace(DEEPSEEK_V3, num_groups=1, top_groups=1)),
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 20.0, 30.0, -20.0, -100.0, 3e38, -3e38]


def make_logits(rows: int, num_experts: int, size: float = 3.0) -> Tensor:
    """Seeded logits."""
    return torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(0)) * size


def make_bias(gate: GateConfig) -> NDArray[np.float32] | None:
    """A selection bias of both signs, if the gate has one."""
    rng = np.random.default_rng(1)
    return rng.normal(size=gate.num_experts).astype(np.float32) if gate.selection_bias else None


def their_routing(family: str, logits_TE: Tensor, bias_E: NDArray[np.float32] | None) -> Tensor:
    """Weights by expert, [T, E], of the family's router; its projection is the identity."""
    router_class, gate = FAMILIES[family]
    config = SimpleNamespace(
        num_experts_per_tok=gate.top_k,
        num_experts=gate.num_experts,
        num_local_experts=gate.num_experts,
        hidden_size=gate.num_experts,
        norm_topk_prob=gate.renormalize,
        routed_scaling_factor=gate.scale,
        n_group=gate.num_groups,
        topk_group=gate.top_groups,
        topk_method="greedy" if gate.num_groups == 1 else "group_limited_greedy",
    )
    router = router_class(config)
    router.weight.data = torch.eye(gate.num_experts)
    if bias_E is not None:
        router.e_score_correction_bias.data = torch.from_numpy(bias_E)
    with torch.no_grad():
        _, weights_TK, ids_TK = router(logits_TE)
    return torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK)


def by_expert(routing: Routing, num_experts: int) -> Tensor:
    """Weights by expert, [T, E]; those of others are 0."""
    weights_TE = torch.zeros(len(routing.topk_ids_TK), num_experts)
    ids_TK = torch.from_numpy(routing.topk_ids_TK.astype(np.int64))
    return weights_TE.scatter(1, ids_TK, torch.from_numpy(routing.topk_weights_TK))


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("shift", [0.0, -6.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_routing_is_that_of_transformers(family: str, shift: float, size: float) -> None:
    """The same experts with the same weights for 3000 rows, also if all logits are negative."""
    _, gate = FAMILIES[family]
    bias_E, logits_TE = make_bias(gate), make_logits(3000, gate.num_experts, size) + shift
    expected = their_routing(family, logits_TE, bias_E)
    actual = by_expert(route(logits_TE, gate, bias_E), gate.num_experts)
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (4, 4), (64, 6), (1, 1)])
def test_routing_matches_the_reference(num_experts: int, top_k: int, renormalize: bool) -> None:
    """Same experts in the same order, and the same weights, as the sort in PyTorch."""
    gate = GateConfig(num_experts, top_k, renormalize=renormalize)
    logits = make_logits(50, num_experts, 1.0).round(decimals=1)
    expected, actual = route_reference(logits, gate), route(logits, gate)
    np.testing.assert_array_equal(actual.topk_ids_TK, expected.topk_ids_TK)
    np.testing.assert_allclose(actual.topk_weights_TK, expected.topk_weights_TK, rtol=1e-5)
    assert (np.int32, np.float32) == (actual.topk_ids_TK.dtype, actual.topk_weights_TK.dtype)


@st.composite
def gates(draw: st.DrawFn) -> GateConfig:
    """Any equation over at most 16 experts."""
    num_groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, num_groups))
    return GateConfig(
        num_experts=num_groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        renormalize_eps=draw(st.sampled_from([0.0, 1e-20])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        selection_bias=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
    )


@settings(deadline=None, max_examples=150)
@given(gates(), st.data())
def test_any_logits_choose_valid_experts(gate: GateConfig, data: st.DataObject) -> None:
    """NaN, infinities, ties and saturation: K different experts of open groups, finite weights,
    the reference's choice, and the same bits alone and in a batch."""
    values = st.sampled_from(SPECIAL)
    row = st.lists(values, min_size=gate.num_experts, max_size=gate.num_experts)
    logits_TE = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    quarter = st.integers(-8, 8).map(lambda i: i / 4)
    biases = st.lists(quarter, min_size=gate.num_experts, max_size=gate.num_experts)
    bias_E = np.array(data.draw(biases), np.float32) if gate.selection_bias else None
    routing, expected = (f(logits_TE, gate, bias_E) for f in (route, route_reference))
    np.testing.assert_array_equal(routing.topk_ids_TK, expected.topk_ids_TK)
    np.testing.assert_allclose(
        routing.topk_weights_TK, expected.topk_weights_TK, rtol=1e-5, atol=1e-20
    )
    for t, ids in enumerate(routing.topk_ids_TK.tolist()):
        _check_row(gate, ids, routing.topk_weights_TK[t])
        alone = route(logits_TE[t : t + 1], gate, bias_E)
        assert alone.topk_ids_TK[0].tolist() == ids
        assert alone.topk_weights_TK[0].tobytes() == routing.topk_weights_TK[t].tobytes()


def _check_row(gate: GateConfig, ids: list[int], weights: NDArray[np.float32]) -> None:
    assert len(set(ids)) == gate.top_k
    assert all(0 <= expert < gate.num_experts for expert in ids)
    size = gate.num_experts // gate.num_groups
    assert len({expert // size for expert in ids}) <= gate.top_groups
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    if gate.renormalize and gate.renormalize_eps == 0:
        np.testing.assert_allclose(weights.sum(), gate.scale, rtol=1e-5)


def test_ties_go_to_the_lowest_id_with_equal_weights() -> None:
    """Four equal logits, or saturated sigmoids: the first experts, with equal weights, exactly."""
    routing = route(torch.tensor([[0.0, 3.0, 3.0, 3.0]]), GateConfig(4, 2))
    assert routing.topk_ids_TK.tolist() == [[1, 2]]
    assert routing.topk_weights_TK.tolist() == [[0.5, 0.5]]
    routing = route(torch.tensor([[0.0, 30.0, 40.0, 50.0]]), GateConfig(4, 2, scoring="sigmoid"))
    assert routing.topk_ids_TK.tolist() == [[1, 2]]
    assert routing.topk_weights_TK.tolist() == [[0.5, 0.5]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """The expert of the lowest score is chosen first, with the weight of its score."""
    gate = GateConfig(3, 2, scoring="sigmoid", renormalize=False, selection_bias=True)
    logits, bias = torch.tensor([[2.0, 1.0, -1.0]]), np.array([0, 0, 5], np.float32)
    routing = route(logits, gate, bias)
    assert routing.topk_ids_TK.tolist() == [[2, 0]]
    expected = torch.tensor([-1.0, 2.0]).sigmoid().numpy()
    np.testing.assert_allclose(routing.topk_weights_TK[0], expected, rtol=1e-6)


def test_closed_groups_are_not_chosen_even_if_all_open_ones_are_nan() -> None:
    """An open expert without a usable logit comes before any closed one."""
    nan = torch.nan
    gate = GateConfig(6, 2, renormalize=False, num_groups=3, top_groups=1)
    routing = route(torch.tensor([[0.0, 1.0, nan, 2.0, 1.5, -1.0]]), gate)
    assert routing.topk_ids_TK.tolist() == [[3, 2]]
    assert routing.topk_weights_TK[0, 1] == 0.0


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (GateConfig(4, 2, num_groups=3), "4 experts cannot be chosen from 1 of 3 groups by max"),
        (GateConfig(4, 2, num_groups=2, top_groups=3), "from 3 of 2 groups"),
        (
            GateConfig(4, 2, num_groups=4, group_score="top2_sum"),
            "from 1 of 4 groups by top2_sum",
        ),
        (GateConfig(4, 2, num_groups=4), "top_k is 2, 1 groups have 1 experts each"),
        (
            GateConfig(4, 2, selection_bias=True),
            r"selection bias has shape None, expected \(4,\)",
        ),
    ],
)
def test_gates_that_cannot_work_are_named(gate: GateConfig, message: str) -> None:
    """The message has what is wrong."""
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(2, 4), gate)


def test_wrong_logits_are_named() -> None:
    """Another dtype or width raises ValueError; so does a bias that the gate does not have."""
    with pytest.raises(ValueError, match=r"expected float32 \[T, 4\]"):
        route(torch.zeros(2, 3), GateConfig(4, 2))
    with pytest.raises(ValueError, match=r"selection bias has shape \(4,\), expected None"):
        route(torch.zeros(2, 4), GateConfig(4, 2), np.zeros(4, np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_gate_and_route_in_one_pass_equal_the_two_steps(family: str, dtype: torch.dtype) -> None:
    """The same ids and bits for any number of rows; a NaN row harms itself alone."""
    config = FAMILIES[family][1]
    generator = torch.Generator().manual_seed(4)
    bias_E = torch.randn(16, generator=generator).numpy() if config.selection_bias else None
    weight_EH = torch.randn(16, 40, generator=generator)
    gate = Gate(pack_linear(weight_EH, torch.randn(16, generator=generator)), config, bias_E)
    h_TH = torch.randn(60, 40, generator=generator).to(dtype)
    h_TH[7] = torch.nan
    together = choose_experts(h_TH, gate)
    expected = route(linear(h_TH, gate.linear, out_dtype=torch.float32), config, bias_E)
    assert np.array_equal(together.topk_ids_TK, expected.topk_ids_TK)
    assert np.array_equal(together.topk_weights_TK, expected.topk_weights_TK)
    assert np.array_equal(together.counts_E, expected.counts_E)
    assert np.array_equal(together.order_N, expected.order_N)
    alone = choose_experts(h_TH[20:21], gate)
    assert np.array_equal(together.topk_weights_TK[20:21], alone.topk_weights_TK)


@pytest.mark.parametrize("rows", [0, 1, 60])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_slots_are_counted_and_ordered_by_expert(family: str, rows: int) -> None:
    """As the reference does it, which is a stable sort; a choice made elsewhere likewise."""
    gate, logits_TE = FAMILIES[family][1], make_logits(rows, 16)
    bias_E = make_bias(gate)
    actual, expected = route(logits_TE, gate, bias_E), route_reference(logits_TE, gate, bias_E)
    made = Routing.of(actual.topk_ids_TK, actual.topk_weights_TK, 16)
    flat_N = actual.topk_ids_TK.reshape(-1)
    for routing in (actual, expected, made):
        assert np.array_equal(routing.counts_E, np.bincount(flat_N, minlength=16))
        assert np.array_equal(routing.order_N, np.argsort(flat_N, kind="stable"))


def test_a_gate_of_parts_that_do_not_fit_is_refused() -> None:
    """When it is made, so that no call need check."""
    gate = pack_linear(torch.ones(16, 4))
    with pytest.raises(ValueError, match="expected float32 with 16"):
        Gate(pack_linear(torch.ones(15, 4)), SOFTMAX)
    with pytest.raises(ValueError, match=r"torch.bfloat16 .*, expected float32"):
        Gate(pack_linear(torch.ones(16, 4).bfloat16()), SOFTMAX)
    with pytest.raises(ValueError, match="selection bias has shape None"):
        Gate(gate, DEEPSEEK_V3)
    with pytest.raises(ValueError, match="cannot be chosen"):
        Gate(gate, replace(SOFTMAX, num_groups=3))
    with pytest.raises(ValueError, match="x has 5 features, expected 4"):
        choose_experts(torch.ones(1, 5), Gate(gate, SOFTMAX))
