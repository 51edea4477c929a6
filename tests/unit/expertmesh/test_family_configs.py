"""Configs of each family against transformers: defaults, spellings, and what its modules hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from expertmesh.families import FAMILIES, load_model_config
from expertmesh.families.config_reader import Json
from expertmesh.model_config import LayerConfig, ModelConfig
from expertmesh_kernels.rope import rope_table
from tests.support.hub_families import (
    MODEL_TYPES,
    hub_config,
    save_config,
    tiny_json,
    transformers_type,
)
from tests.support.hub_modules import check_attention, check_ffn

NOT_FIELDS = {"sliding_window_pattern": 6, "torch_dtype": "bfloat16"}
"""Keys with a default that transformers does not declare as a field."""


def parse(folder: Path, raw: Json) -> ModelConfig:
    """What we read from this `config.json`."""
    return load_model_config(save_config(folder, raw))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """Every key that may be left out."""
    config_class = type(AutoConfig.for_model(transformers_type(model_type)))
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    expected = NOT_FIELDS | fields
    found = {k: v for k, v in FAMILIES[model_type].defaults.items() if k != "rope_parameters"}
    assert found == {key: expected[key] for key in found}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_config_without_keys_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    """`config.json` with nothing but the type, and with all that transformers makes of it."""
    bare: Json = {"model_type": model_type}
    if model_type == "deepseek_v2":  # the only key without a default
        bare["num_experts_per_tok"] = 6
    whole = _through_transformers(tmp_path / "whole", bare)
    assert parse(tmp_path / "bare", bare) == parse(tmp_path / "saved", whole)


def _through_transformers(folder: Path, raw: Json) -> Json:
    """The same config as transformers writes it."""
    config = hub_config(folder, raw).to_dict()
    return config | {"model_type": raw["model_type"], "dtype": raw.get("dtype")}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
_NO_ROPE: Json = {"rope_parameters": ...}

SPELLINGS: dict[str, tuple[str, Json]] = {
    "llama theta": ("llama", {**_NO_ROPE, "rope_theta": 5e5}),
    "llama no rope keys": ("llama", _NO_ROPE),
    "llama linear": ("llama", {**_NO_ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama llama3": (
        "llama",
        {**_NO_ROPE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "llama both": (
        "llama",
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "llama null scaling": ("llama", {**_NO_ROPE, "rope_theta": 9.0, "rope_scaling": None}),
    "llama yarn": ("llama", {**_NO_ROPE, "rope_scaling": {"type": "yarn", **YARN}}),
    "llama yarn without original": (
        "llama",
        {**_NO_ROPE, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}},
    ),
    "llama yarn with its factor": (
        "llama",
        {**_NO_ROPE, "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5}},
    ),
    "llama without key heads": ("llama", {"num_key_value_heads": ..., "head_dim": ...}),
    "llama null head size": ("llama", {"head_dim": None}),
    "llama tokens": ("llama", {"eos_token_id": [3, 4], "bos_token_id": None}),
    "mistral default window": ("mistral", {"sliding_window": ...}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2 windows off": ("qwen2", {"use_sliding_window": False}),
    "qwen2 null window": ("qwen2", {"sliding_window": None}),
    "qwen2 default start": ("qwen2", {"max_window_layers": ...}),
    "qwen2 types": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "max_window_layers": 4},
    ),
    "qwen3 default head size": ("qwen3", {"head_dim": ...}),
    "qwen3 old names": ("qwen3", {"layer_types": ["attention"] * 4}),
    "qwen2_moe windows off": ("qwen2_moe", {"use_sliding_window": False}),
    "qwen2_moe each second": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": ...}),
    "qwen3_moe window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    "qwen3_moe other name": ("qwen3_moe", {"num_experts": ..., "num_local_experts": 5}),
    "gemma2 no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 types": ("gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
    "gemma3_text no ropes": ("gemma3_text", {**_NO_ROPE, "final_logit_softcapping": 9.0}),
    "gemma3_text old": (
        "gemma3_text",
        {
            **_NO_ROPE,
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3_text one rope": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
    ),
    "mixtral other name": ("mixtral", {"num_local_experts": ..., "num_experts": 6}),
    "mixtral window": ("mixtral", {"sliding_window": 11}),
    "olmoe no clip": ("olmoe", {"clip_qkv": None, "norm_topk_prob": True}),
    "deepseek_v2 default": (
        "deepseek_v2",
        {**_NO_ROPE, "topk_method": ..., "q_lora_rank": ..., "n_group": None, "topk_group": None},
    ),
    "deepseek_v2 yarn": (
        "deepseek_v2",
        {
            **_NO_ROPE,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3 mscale alone": (
        "deepseek_v3",
        {**_NO_ROPE, "rope_scaling": {"type": "yarn", **YARN, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v3 halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3 no module": ("deepseek_v3", {"num_nextn_predict_layers": 0}),
    "gpt_oss hub": (
        "gpt_oss",
        {
            **_NO_ROPE,
            "rope_theta": 150000,
            "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False},
            "swiglu_limit": 5.0,
        },
    ),
    "gpt_oss default rope": ("gpt_oss", {**_NO_ROPE, "max_position_embeddings": 131072}),
    "gpt_oss types": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_key_value_heads": 3},
    ),
    "mimo_v2_flash types": (
        "mimo_v2_flash",
        {
            "layer_types": ["sliding_attention"] * 6 + ["full_attention"],
            "mlp_layer_types": ["sparse"] * 5 + ["dense"] * 2,
            "attention_value_scale": None,
            "routed_scaling_factor": None,
            "n_group": 2,
        },
    ),
    "mimo_v2_flash ropes": (
        "mimo_v2_flash",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 3e6,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
}
"""Keys as files have them, old and new, in the family's tiny model."""

ALL = {name: (name, {}) for name in MODEL_TYPES} | SPELLINGS


@pytest.mark.parametrize(("model_type", "changes"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_mean_what_they_mean_to_transformers(
    model_type: str, changes: Json, tmp_path: Path
) -> None:
    """What we read is what we read from the file that transformers writes after reading it."""
    raw = tiny_json(model_type, **changes)
    saved = _through_transformers(tmp_path / "hub", raw)
    assert parse(tmp_path / "ours", raw) == parse(tmp_path / "saved", saved)


@pytest.mark.parametrize(("model_type", "changes"), ALL.values(), ids=ALL)
def test_layers_are_those_of_transformers(model_type: str, changes: Json, tmp_path: Path) -> None:
    """Sizes, scales, windows, ropes, gates: as the modules of a model of transformers have them."""
    raw = tiny_json(model_type, **changes)
    config = parse(tmp_path / "ours", raw)
    hub = hub_config(tmp_path / "hub", raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hub)
    assert len(config.layers) == len(model.model.layers)
    for layer, module in zip(config.layers, model.model.layers, strict=True):
        check_attention(layer.attention, module.self_attn)
        check_ffn(layer.ffn, module.mlp)
    assert config.norm.eps == hub.rms_norm_eps
    assert config.vocab_size == hub.vocab_size
    assert config.max_position_embeddings == hub.max_position_embeddings
    assert config.tie_word_embeddings == hub.tie_word_embeddings
    assert config.logits_softcap == getattr(hub, "final_logit_softcapping", None)
    assert config.embedding_scale == getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    _check_tokens(config, hub)


def _check_tokens(config: ModelConfig, hub: PreTrainedConfig) -> None:
    end = hub.eos_token_id
    expected = () if end is None else tuple(end) if isinstance(end, list) else (end,)
    assert (config.bos_token_id, config.eos_token_ids) == (hub.bos_token_id, expected)


@pytest.mark.parametrize(("model_type", "changes"), ALL.values(), ids=ALL)
def test_ropes_rotate_as_those_of_transformers(
    model_type: str, changes: Json, tmp_path: Path
) -> None:
    """Cosines and sines of each layer's rope at a few positions."""
    raw = tiny_json(model_type, **changes)
    config = parse(tmp_path / "ours", raw)
    model = AutoModelForCausalLM.from_config(hub_config(tmp_path / "hub", raw))
    positions = torch.tensor([[0, 1, 5, 77]])
    for layer in set(config.layers):
        cos, sin = _hub_rope(model, layer, positions)
        rope = layer.attention.rope
        assert cos.shape[-1] == rope.dim // 2
        table = rope_table(rope, 78)
        torch.testing.assert_close(table.cos_LD[positions[0], : rope.dim // 2], cos)
        torch.testing.assert_close(table.sin_LD[positions[0], : rope.dim // 2], sin)


def _hub_rope(
    model: PreTrainedModel, layer: LayerConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a layer, one per pair of dimensions."""
    module = model.model.rotary_emb
    window = layer.attention.sliding_window is not None
    kind = "sliding_attention" if window else "full_attention"
    arguments = (kind,) if isinstance(module.rope_type, dict) else ()
    found = module(torch.zeros(1), positions, *arguments)
    if isinstance(found, torch.Tensor):  # complex numbers
        return found.real[0], found.imag[0]
    cos, sin = found
    pairs = layer.attention.rope.dim // 2
    return cos[0, :, :pairs], sin[0, :, :pairs]


def test_mimo_reads_the_config_of_the_hub(tmp_path: Path) -> None:
    """Both spellings describe one model; the older window counts the keys before the query."""
    layers = tiny_json("mimo_v2_flash")["num_hidden_layers"]
    assert isinstance(layers, int)
    window = [int(i % 3 > 0) for i in range(layers)]
    sparse = [int(i != 2) for i in range(layers)]
    hub = {
        "hybrid_layer_pattern": window,
        "moe_layer_freq": sparse,
        "sliding_window": 12,
        "sliding_window_size": 12,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "rope_theta": 3e6,
        "swa_rope_theta": 2e4,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "rope_scaling": None,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": None,
    }
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    new = {
        "layer_types": [_layer_type(flag) for flag in window],
        "mlp_layer_types": ["sparse" if flag else "dense" for flag in sparse],
        "sliding_window": 13,
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": 3e6},
            "sliding_attention": rope | {"rope_theta": 2e4},
        },
        "rms_norm_eps": 1e-4,
    }
    found = parse(tmp_path / "hub", tiny_json("mimo_v2_flash", **hub))
    assert found == parse(tmp_path / "new", tiny_json("mimo_v2_flash", **new))
    both = {key: hub[key] for key in ("hybrid_layer_pattern", "moe_layer_freq")}
    assert found == parse(tmp_path / "both", tiny_json("mimo_v2_flash", **new, **both))


def _layer_type(flag: int) -> str:
    return "sliding_attention" if flag else "full_attention"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tiny_models_have_layers_of_every_kind(model_type: str, tmp_path: Path) -> None:
    """What a family can have within one model, its tiny model has."""
    layers = parse(tmp_path, tiny_json(model_type)).layers

    def kinds(values: Iterable[object]) -> int:
        return len(set(values))

    windows = kinds(layer.attention.sliding_window for layer in layers)
    ffns = kinds(type(layer.ffn) for layer in layers)
    one_window = {"llama", "mistral", "mixtral", "qwen3_moe", "olmoe"}
    no_window = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
    both_ffns = {"qwen2_moe", "qwen3_moe", "mimo_v2_flash"} | no_window
    assert windows == (1 if model_type in one_window | no_window else 2)
    assert ffns == (2 if model_type in both_ffns else 1)
