"""`config.json` and `generation_config.json` from a `ModelConfig`: the inverse of the families."""

from __future__ import annotations

import json

from expertmesh.families import FAMILIES
from expertmesh.families.config_reader import Json
from expertmesh.model_config import LayerConfig, ModelConfig, MoeFfnConfig, RopeConfig


def config_json(config: ModelConfig) -> Json:
    """The keys that transformers and our families read. All layers have to be alike."""
    layer = config.layers[0]
    assert all(other == layer for other in config.layers), "layers differ"
    attention = layer.gqa
    return {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.ffn.intermediate_size,
        "hidden_act": layer.ffn.activation.kind,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": _rope_json(attention.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _eos(config),
        **_ffn_json(layer),
    }


def generation_config_json(config: ModelConfig) -> Json:
    """Begin and end tokens."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": _eos(config)}


def encode(value: object) -> bytes:
    """Readable JSON with a final line break."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _ffn_json(layer: LayerConfig) -> Json:
    if isinstance(layer.ffn, MoeFfnConfig):
        return {
            "num_local_experts": layer.ffn.num_experts,
            "num_experts_per_tok": layer.ffn.gate.top_k,
            "sliding_window": layer.gqa.sliding_window,
        }
    return {"attention_bias": layer.gqa.qkv_bias, "mlp_bias": layer.ffn.bias}


def _rope_json(rope: RopeConfig) -> Json:
    found: Json = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        found["factor"] = rope.factor
    if rope.kind == "llama3":
        found["low_freq_factor"] = rope.low_freq_factor
        found["high_freq_factor"] = rope.high_freq_factor
        found["original_max_position_embeddings"] = rope.original_max_position
    return found


def _eos(config: ModelConfig) -> int | list[int] | None:
    ids = config.eos_token_ids
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
