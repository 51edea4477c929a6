"""`config.json` of released models with latent attention, with every key that such files have."""

from __future__ import annotations

from tests.support.hub_configs import COMMON, FP8, Config

_DEEPSEEK: Config = {
    **COMMON,
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}


def _yarn(factor: float, mscale: float, beta_fast: float = 32) -> Config:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


def _remote_code(name: str) -> Config:
    return {
        "AutoConfig": f"configuration_deepseek.{name}Config",
        "AutoModel": f"modeling_deepseek.{name}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{name}ForCausalLM",
    }


_DEEPSEEK_V2: Config = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": _remote_code("DeepseekV2"),
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_scaling": _yarn(40, 0.707),
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
_DEEPSEEK_V2_LITE: Config = {
    **_DEEPSEEK_V2,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
_DEEPSEEK_V2_LARGE: Config = {
    **_DEEPSEEK_V2,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_scaling": _yarn(40, 1.0),
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
_DEEPSEEK_V3: Config = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": _remote_code("DeepseekV3"),
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": _yarn(40, 1.0),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_KIMI_K2: Config = {
    **_DEEPSEEK_V3,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "rope_scaling": _yarn(32.0, 1.0, beta_fast=1.0),
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
_KIMI_INT4: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

LATENT: dict[str, Config] = {
    "DeepSeek-V2-Lite": _DEEPSEEK_V2_LITE,
    "DeepSeek-Coder-V2-Lite-Instruct": _DEEPSEEK_V2_LITE,
    "DeepSeek-V2": _DEEPSEEK_V2_LARGE,
    "DeepSeek-V2.5": _DEEPSEEK_V2_LARGE,
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-V3.1": {**_DEEPSEEK_V3, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
    "Moonlight-16B-A3B-Instruct": {
        **{key: value for key, value in _DEEPSEEK_V3.items() if key != "quantization_config"},
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "Kimi-K2-Instruct": _KIMI_K2,
    "Kimi-K2-Thinking": {
        **_KIMI_K2,
        "max_position_embeddings": 262144,
        "quantization_config": _KIMI_INT4,
        "rope_scaling": _yarn(64.0, 1.0, beta_fast=1.0),
    },
}
"""By name."""
