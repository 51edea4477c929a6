"""Numbers of weights, against the modules of transformers and against published figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from expertmesh.families import FAMILIES, load_model_config
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
from expertmesh.model_tools.model_size import Weights, model_size
from tests.support.hub_families import transformers_type
from tests.support.published_models import PUBLISHED, PublishedModel

ROPE = RopeConfig(1e4, 8)
GQA = GqaConfig(num_heads=6, num_kv_heads=2, head_dim=8, rope=ROPE, scale=1.0)
MLA = MlaConfig(
    num_heads=6,
    q_lora_rank=20,
    kv_lora_rank=12,
    nope_head_dim=10,
    rope_head_dim=4,
    value_dim=14,
    rope=ROPE,
    scale=1.0,
)
DENSE = DenseFfnConfig(40)
MOE = MoeFfnConfig(GateConfig(5, 2), 24)

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": None,
}
LATENT: Mapping[str, Any] = {
    **SIZES,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def model(layer: LayerConfig, *first: LayerConfig, tied: bool = False) -> ModelConfig:
    """Three layers, the first ones as given."""
    layers = (*first, *(layer,) * (3 - len(first)))
    return ModelConfig("gpt_oss", 96, 36, layers, NormConfig(1e-6), 64, tied, "float32")


KINDS: dict[str, tuple[ModelConfig, str, Mapping[str, Any]]] = {
    "dense with biases": (
        model(LayerConfig(replace(GQA, qkv_bias=True, o_bias=True), replace(DENSE, bias=True))),
        "llama",
        {**SIZES, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "norms of heads, tied": (
        model(LayerConfig(replace(GQA, qk_norm="head"), DENSE), tied=True),
        "qwen3",
        {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "norms of outputs": (
        model(LayerConfig(GQA, DENSE, out_norms=True), tied=True),
        "gemma2",
        {**SIZES, "head_dim": 8},
    ),
    "norms over all heads": (
        model(LayerConfig(replace(GQA, head_dim=6, qk_norm="whole"), MOE)),
        "olmoe",
        {**SIZES, "intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "gated shared expert after a dense layer": (
        model(
            LayerConfig(
                replace(GQA, head_dim=6, qkv_bias=True),
                replace(MOE, shared=SharedExpertConfig(28, gated=True)),
            ),
            LayerConfig(replace(GQA, head_dim=6, qkv_bias=True), DENSE),
        ),
        "qwen2_moe",
        {
            **SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [0],
        },
    ),
    "sinks, biases of gate and experts": (
        model(
            LayerConfig(
                replace(GQA, qkv_bias=True, o_bias=True, sinks=True),
                MoeFfnConfig(GateConfig(5, 2, bias=True), 40, bias=True),
            )
        ),
        "gpt_oss",
        {**SIZES, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "latent, selection bias, shared expert": (
        model(
            LayerConfig(
                replace(MLA, bias=True),
                replace(
                    MOE,
                    gate=GateConfig(5, 2, selection_bias=True),
                    shared=SharedExpertConfig(48),
                ),
            ),
            LayerConfig(replace(MLA, bias=True), DENSE),
        ),
        "deepseek_v3",
        {**LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "latent with a full query projection": (
        model(
            LayerConfig(replace(MLA, q_lora_rank=None), replace(MOE, shared=SharedExpertConfig(24)))
        ),
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "values smaller than keys, sinks on some layers": (
        model(
            LayerConfig(
                replace(GQA, value_head_dim=4, sliding_window=9, sinks=True),
                replace(MOE, gate=GateConfig(5, 2, selection_bias=True)),
            ),
            LayerConfig(replace(GQA, num_kv_heads=1, value_head_dim=4), DENSE),
        ),
        "mimo_v2_flash",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "v_head_dim": 4,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


def parameters_of_transformers(model_type: str, sizes: Mapping[str, Any]) -> int:
    """Weights of the real module, and selection biases, which are buffers there."""
    config = AutoConfig.for_model(transformers_type(model_type), **sizes)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    biases = (data for name, data in module.named_buffers() if "score_correction_bias" in name)
    return sum(data.numel() for data in (*module.parameters(), *biases))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers(kind: str) -> None:
    """Every kind of attention, norm, bias, gate and expert counts as in the real module."""
    config, model_type, sizes = KINDS[kind]
    size = model_size(replace(config, family=model_type))
    assert size.total == parameters_of_transformers(model_type, sizes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_of_tiny_models(model_type: str, tmp_path: Path) -> None:
    """Layers of every kind that a family has."""
    sizes = dict(FAMILIES[model_type].tiny)
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": model_type}))
    size = model_size(load_model_config(tmp_path))
    assert size.total == parameters_of_transformers(model_type, sizes)


def test_every_family_has_a_published_model() -> None:
    """Against whose figures it is held."""
    assert {model.model_type for model in PUBLISHED} == set(FAMILIES)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda model: model.name)
def test_sizes_of_published_models(published: PublishedModel, tmp_path: Path) -> None:
    """From `config.json` alone: the numbers of the real module, and those on the model's card."""
    expected = parameters_of_transformers(published.model_type, published.sizes)
    size = model_size(load_model_config(published.save(tmp_path)))
    assert size.total == expected
    assert size.total / 1e9 == pytest.approx(published.total_b, rel=0.01)
    embedding = 0 if published.active_has_embedding else size.embedding.count
    assert (size.active - embedding) / 1e9 == pytest.approx(published.active_b, rel=0.03)


def test_weights_are_counted_by_type() -> None:
    """Norms, gates and the like are FP32 whatever is served."""
    assert Weights(plain=10, exact=3).nbytes(2) == 32
    gate = GateConfig(5, 2, bias=True, selection_bias=True)
    layer = model_size(model(LayerConfig(GQA, replace(MOE, gate=gate)))).layers[0]
    assert layer.resident.exact == (5 * 36 + 5 + 5) + 2 * 36
    assert layer.resident.plain == 36 * (48 + 16 + 16 + 48)
    assert layer.expert == Weights(plain=3 * 36 * 24)
    assert layer.experts == layer.expert * 5
    assert layer.chosen == layer.expert * 2
