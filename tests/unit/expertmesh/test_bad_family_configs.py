"""Configs that cannot be served: each bad value is named in one line, in every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertmesh.errors import CheckpointError
from expertmesh.families import load_model_config
from expertmesh.families.config_reader import Json
from tests.support.hub_families import MODEL_TYPES, save_config, tiny_json

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

NOT_SUPPORTED: list[tuple[str, Json, str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act: expected one of silu,"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type: expected"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: expected"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
        "rope_parameters.mrope_section: expected null or false",
    ),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters.full_attention: expected no rope of its own",
    ),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types: expected"),
    (
        "qwen2",
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
        "use_sliding_window: expected true",
    ),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types: expected full_attention or"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: expected one of"),
    ("gemma2", {"sliding_window": None}, "sliding_window: expected an integer"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters.rope_type: expected nothing but full_attention and sliding_attention",
    ),
    ("olmoe", {"sliding_window": 9}, "sliding_window: expected"),
    ("olmoe", {"head_dim": 8}, "head_dim: expected hidden_size / num_attention_heads"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: expected null or false"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias: expected null or false"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: expected 'softmax'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: expected one of greedy,"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
    ("kimi_k2", {"n_shared_experts": None}, "n_shared_experts: expected an integer"),
    ("mimo_v2_flash", {"attention_projection_layout": "fused_qkv"}, "attention_projection_layout"),
    ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts: expected null or 0"),
    ("mimo_v2_flash", {"rope_scaling": YARN}, "rope_scaling.rope_type: expected 'default'"),
    ("mimo_v2_flash", {"partial_rotary_factor": 0.3}, "partial_rotary_factor: expected an even"),
]
"""Values that stand for a computation that we do not have."""

CONTRADICTIONS: list[tuple[str, Json, str]] = [
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of"),
    ("llama", {"head_dim": None, "hidden_size": 50}, "hidden_size: expected a multiple of"),
    (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 2}},
        "rope_parameters.beta_fast: expected beta_slow=2",
    ),
    (
        "llama",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": YARN | {"original_max_position_embeddings": 32},
        },
        "original_max_position_embeddings: expected 32",
    ),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor: expected"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: expected a list of 4"),
    ("qwen3_moe", {"num_local_experts": 9}, "num_local_experts: expected the same as num_experts"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: expected an integer in [1, 8]"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected"),
    ("qwen2_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers: expected integers"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern: expected"),
    ("deepseek_v2", {"n_group": 3}, "n_group: expected a divisor of 8"),
    ("deepseek_v2", {"n_group": None}, "n_group: expected an integer"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: expected"),
    ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok: expected an integer"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_group: expected a divisor"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group: expected an integer in [1, 4]"),
    (
        "deepseek_v3",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok: expected an integer in [1, 4",
    ),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even size"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit: expected a number"),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [2] * 7}, "hybrid_layer_pattern: expected a list"),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [True] * 7}, "hybrid_layer_pattern: expected a li"),
    ("mimo_v2_flash", {"moe_layer_freq": [1] * 6}, "moe_layer_freq: expected a list of 7"),
    ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "swa_num_key_value_heads: expected a div"),
    (
        "mimo_v2_flash",
        {"layernorm_epsilon": 1e-4, "rms_norm_eps": 1e-5},
        "the same as rms_norm_eps",
    ),
    (
        "mimo_v2_flash",
        {"layer_types": ["full_attention"] * 7, "hybrid_layer_pattern": [0] * 6 + [1]},
        "hybrid_layer_pattern: expected the same layers",
    ),
    (
        "mimo_v2_flash",
        {"mlp_layer_types": ["dense"] * 7, "moe_layer_freq": [0] * 6 + [1]},
        "moe_layer_freq: expected the same layers",
    ),
]
"""Values that do not fit each other or the family."""


@pytest.mark.parametrize(("model_type", "changes", "expected"), NOT_SUPPORTED + CONTRADICTIONS)
def test_value_is_refused_by_name(
    model_type: str, changes: Json, expected: str, tmp_path: Path
) -> None:
    """Nothing that would change the result is ignored."""
    message = _refusal(tmp_path, tiny_json(model_type, **changes))
    assert expected in message


def _refusal(folder: Path, raw: Json) -> str:
    save_config(folder, raw)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.message.startswith(f"{folder / 'config.json'}: ")
    return caught.value.message


def _keys(model_type: str) -> list[str]:
    """Keys that a family reads and that a file may get wrong."""
    raw = tiny_json(model_type)
    return [key for key in raw if key not in ("dtype", "model_type", "architectures")]


IGNORED = {"head_dim": {"deepseek_v2", "deepseek_v3", "kimi_k2"}}
"""Keys that some families do not use; transformers computes them from others."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("value", ["x", [], [None], {"x": 1}, -1, 1 << 40, 1e300, [[]]], ids=repr)
def test_every_key_is_checked(model_type: str, value: object, tmp_path: Path) -> None:
    """A value of the wrong type or far out of bounds is refused, whatever the key."""
    for key in _keys(model_type):
        if model_type in IGNORED.get(key, ()) or _is_fine(key, value):
            continue
        message = _refusal(tmp_path, tiny_json(model_type, **{key: value}))
        assert key in message


def _is_fine(key: str, value: object) -> bool:
    """Lists that may be empty; and transformers, too, passes over names that no rope has."""
    empty = value == [] and key in ("eos_token_id", "mlp_only_layers")
    return empty or (value == {"x": 1} and key == "rope_parameters")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_numbers_beyond_floats_are_refused(model_type: str, tmp_path: Path) -> None:
    """1e999 is no number that JSON can hold as a float."""
    text = json.dumps(tiny_json(model_type, rms_norm_eps=12345.0)).replace("12345.0", "1e999")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_classes_are_refused(model_type: str, tmp_path: Path) -> None:
    """A classifier has the same `model_type` as the model that it was made from."""
    raw = tiny_json(model_type, architectures=["LlamaForSequenceClassification"])
    assert "architectures: expected" in _refusal(tmp_path, raw)
