"""What a model takes: KV cache, memory of processes, work and traffic of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.model_config import (
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
    SharedExpertConfig,
)
from expertmesh.model_tools.expert_traffic import expected_workers, traffic
from expertmesh.model_tools.kv_size import KvBytes, kv_of_context, kv_per_token
from expertmesh.model_tools.model_facts import ModelFacts, model_facts
from expertmesh.model_tools.model_size import model_size
from expertmesh.model_tools.token_cost import token_cost
from expertmesh.model_tools.worker_memory import attention_worker_nbytes, expert_worker_nbytes
from expertmesh.placement import expert_share

ROPE = RopeConfig(1e4, 8)
GQA = GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE, scale=1.0)
WINDOW = replace(GQA, num_kv_heads=1, value_head_dim=4, sliding_window=10)
MLA = MlaConfig(
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=12,
    nope_head_dim=6,
    rope_head_dim=4,
    value_dim=5,
    rope=ROPE,
    scale=1.0,
)
DENSE = DenseFfnConfig(40)
MOE = MoeFfnConfig(GateConfig(5, 2), 24, shared=SharedExpertConfig(8))
H, V = 16, 50


def model(*layers: LayerConfig, tied: bool = False) -> ModelConfig:
    """A model with these layers."""
    latent = any(isinstance(layer.attention, MlaConfig) for layer in layers)
    family = "deepseek_v2" if latent else "qwen2_moe"
    return ModelConfig(family, V, H, layers, NormConfig(1e-6), 64, tied, "bfloat16")


MIXED = model(LayerConfig(GQA, DENSE), LayerConfig(WINDOW, MOE), LayerConfig(WINDOW, MOE))


def test_kv_cache_of_windows_stops_growing() -> None:
    """A layer with a window keeps no more than its window; values may be smaller than keys."""
    full, window = 2 * (8 + 8) * 2, 2 * (8 + 4) * 2
    assert kv_per_token(MIXED, 2) == KvBytes(full, window)
    assert kv_of_context(MIXED, 10, 2) == KvBytes(10 * full, 10 * window)
    assert kv_of_context(MIXED, 11, 2) == KvBytes(11 * full, 10 * window)


def test_kv_cache_of_latent_attention() -> None:
    """One latent and one key part with rope, whatever the number of heads."""
    assert kv_per_token(model(LayerConfig(MLA, DENSE)), 4) == KvBytes((12 + 4) * 4, 0)


@pytest.mark.parametrize(
    ("workers", "expected"), [(1, (5, 5)), (2, (2, 3)), (4, (1, 2)), (8, (0, 1))]
)
def test_experts_that_do_not_divide(workers: int, expected: tuple[int, int]) -> None:
    """Some expert workers have one more; together they have all, once."""
    size = model_size(MIXED)
    share = expert_worker_nbytes(MIXED, size, workers, 2)
    one = 3 * H * 24 * 2
    assert (share.fewest_experts, share.most_experts) == expected
    assert (share.min_nbytes, share.max_nbytes) == tuple(2 * one * count for count in expected)
    shares = [expert_share(i, workers, 5) for i in range(workers)]
    assert [expert for share in shares for expert in share] == list(range(5))


def test_tied_embedding_is_held_twice() -> None:
    """As a table to look up, and packed for the output."""
    tied, apart = (model(LayerConfig(GQA, DENSE), tied=tied) for tied in (True, False))
    assert model_size(tied).total == model_size(apart).total - V * H
    assert attention_worker_nbytes(tied, model_size(tied), 2) == attention_worker_nbytes(
        apart, model_size(apart), 2
    )


def test_cost_of_a_token_by_hand() -> None:
    """Every weight outside of norms once, one row of the embedding, two experts, all the keys."""
    cost = token_cost(MIXED, model_size(MIXED), context=20, itemsize=2)
    matrices = H * (32 + 16 + 16 + 32) + 2 * H * (32 + 8 + 4 + 16)  # q, k, v and o of all layers
    matrices += 3 * H * 40 + 2 * 3 * H * 8 + H * V  # dense FFN, shared experts, output
    exact = 7 * H + 2 * 5 * H  # norms and gates
    kv = 20 * 2 * 16 * 2 + 2 * 10 * (8 + 4) * 2
    assert cost.attention.nbytes == 2 * (matrices + H) + 4 * exact + kv
    scores = 2 * 4 * (8 + 8) * 20 + 2 * 2 * 4 * (8 + 4) * 10
    assert cost.attention.operations == 2 * (matrices + exact) + scores
    chosen = 2 * 2 * 3 * H * 24  # in two layers two experts
    assert (cost.experts.nbytes, cost.experts.operations) == (2 * chosen, 2 * chosen)
    assert cost.total.nbytes == cost.attention.nbytes + cost.experts.nbytes


def test_latent_attention_scores_the_latent() -> None:
    """Heads attend to latent and rope part, and sum latents."""
    config = model(LayerConfig(MLA, DENSE))
    costs = [
        token_cost(config, model_size(config), context=n, itemsize=2).attention.operations
        for n in (1, 2)
    ]
    assert costs[1] - costs[0] == 2 * 4 * ((12 + 4) + 12)


@pytest.mark.parametrize(
    ("experts", "top_k", "workers", "expected"),
    [(128, 8, 2, 1.99), (128, 8, 4, 3.63), (128, 8, 8, 5.34), (128, 8, 16, 6.60), (8, 2, 2, 1.571)],
)
def test_expected_workers_of_large_models(
    experts: int, top_k: int, workers: int, expected: float
) -> None:
    """W * (1 - C(E - E/W, k) / C(E, k))."""
    found = expected_workers(GateConfig(experts, top_k), shares(workers, experts))
    assert found == pytest.approx(expected, abs=5e-3)


@given(data=st.data())
def test_expected_workers_is_the_mean_over_all_choices(data: st.DataObject) -> None:
    """Counted one by one: every choice of groups, every choice of experts in them."""
    groups = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 3))
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * size))
    workers = data.draw(st.integers(1, 6))
    gate = GateConfig(groups * size, top_k, num_groups=groups, top_groups=top_groups)
    held = shares(workers, gate.num_experts)
    visits = [sum(bool(set(share) & set(c)) for share in held) for c in choices(gate)]
    assert expected_workers(gate, held) == pytest.approx(sum(visits) / len(visits))


def test_traffic_of_a_token() -> None:
    """Rows out and back over all MoE layers, in the type that is served."""
    sent = traffic(MIXED, 2, 2)
    per_layer = (1 - 3 / 10) + (1 - 1 / 10)  # C(3, 2) and C(2, 2) of C(5, 2) miss 2 and 3 experts
    assert sent.rows_out == pytest.approx(2 * per_layer)
    assert sent.nbytes_out == pytest.approx(2 * per_layer * H * 2)
    assert (sent.rows_back, sent.nbytes_back) == (4, 4 * H * 2)


def test_dense_model_has_no_experts_anywhere() -> None:
    """Nothing is told about expert workers."""
    facts: ModelFacts = model_facts(model(LayerConfig(GQA, DENSE)), 5)
    assert (facts.expert_workers, facts.traffic, facts.expert_nbytes) == ((), (), 0)
    assert (facts.token.experts.nbytes, facts.token.experts.operations) == (0, 0)


def shares(workers: int, experts: int) -> list[range]:
    """Even shares."""
    return [expert_share(i, workers, experts) for i in range(workers)]


def choices(gate: GateConfig) -> Iterator[tuple[int, ...]]:
    """Every choice of groups, and of experts in them."""
    size = gate.num_experts // gate.num_groups
    for groups in combinations(range(gate.num_groups), gate.top_groups):
        eligible = [group * size + i for group in groups for i in range(size)]
        yield from combinations(eligible, gate.top_k)
