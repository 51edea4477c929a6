"""Released models made small: every key and option as released, sizes as in tiny models."""

from __future__ import annotations

from tests.support.hub_configs import Config

VOCAB_SIZE = 150
WINDOW = 10
"""Keys that a query sees, itself included."""
_SHRINK = 64
"""What contexts are divided by, so that ropes are stretched within short prompts."""
_SIZES: Config = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "intermediate_size": 56,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 7,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "pad_token_id": 0,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 40,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW - 1,
    "swa_head_dim": 24,
    "swa_v_head_dim": 10,
    "v_head_dim": 10,
    "vocab_size": VOCAB_SIZE,
}
_LISTS = ("layer_types", "hybrid_layer_pattern", "moe_layer_freq")


def scaled_down(config: Config) -> Config:
    """The config with small sizes, heads in their proportion, and weights stored plainly."""
    small = {key: _small(key, value) for key, value in config.items()}
    small.pop("quantization_config", None)
    small |= _heads(config)
    layers = small["num_hidden_layers"]
    small |= {key: small[key][:layers] for key in _LISTS if isinstance(small.get(key), list)}
    small["torch_dtype"] = "float32"
    return small


def _small(key: str, value: object) -> object:
    if value is None:
        return None
    if key == "max_position_embeddings":
        assert isinstance(value, int)
        return max(512, value // _SHRINK)
    if key in ("rope_scaling", "rope_parameters"):
        assert isinstance(value, dict)
        original = value["original_max_position_embeddings"] // _SHRINK
        return value | {"original_max_position_embeddings": original}
    return _SIZES.get(key, value)


def _heads(config: Config) -> Config:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    small_kv = 4 if kv_heads == heads else min(kv_heads, 2)
    small = small_kv * heads // kv_heads
    made: Config = {"num_attention_heads": small, "num_key_value_heads": small_kv}
    if "swa_num_attention_heads" in config:
        made |= {
            "swa_num_attention_heads": small,
            "swa_num_key_value_heads": 2 * small_kv,
            "head_dim": 24,
        }
    return made | {"hidden_size": 48 if "head_dim" in config else 12 * small}
