"""`config.json` of released models with every key that such files have, dense ones here.

With what a family does not read too: settings of training, code that a file would like to run,
keys of other versions, null and empty values.
Written down key by key; no file is theirs.
"""

from __future__ import annotations

Config = dict[str, object]

COMMON: Config = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}

FP8: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""`quantization_config`."""

_LLAMA: Config = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_MISTRAL: Config = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN: Config = {
    **COMMON,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_QWEN2: Config = {
    **QWEN,
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "use_mrope": False,
}
_QWEN3: Config = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
_GEMMA2: Config = {
    **COMMON,
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
_GEMMA3: Config = {
    **COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def _llama3(factor: float) -> Config:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _sizes(width: int, layers: int, heads: int, neurons: int) -> Config:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": neurons,
    }


DENSE: dict[str, Config] = {
    "Llama-3.1-8B-Instruct": {
        **_LLAMA,
        **_sizes(4096, 32, 32, 14336),
        "max_position_embeddings": 131072,
        "rope_scaling": _llama3(8.0),
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B-Instruct": {
        **_LLAMA,
        **_sizes(2048, 16, 32, 8192),
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_scaling": _llama3(32.0),
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M-Instruct": {
        **_LLAMA,
        **_sizes(576, 30, 9, 1536),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": _MISTRAL,
    "Mistral-7B-Instruct-v0.3": {
        **_MISTRAL,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "Mistral-Nemo-Instruct-2407": {
        **_MISTRAL,
        **_sizes(5120, 40, 32, 14336),
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "Qwen2.5-7B-Instruct": {
        **_QWEN2,
        **_sizes(3584, 28, 28, 18944),
        "max_window_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "vocab_size": 152064,
    },
    "Qwen2.5-72B-Instruct with YaRN": {
        **_QWEN2,
        **_sizes(8192, 80, 64, 29568),
        "max_window_layers": 70,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
        "sliding_window": 131072,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        **_QWEN3,
        **_sizes(1024, 28, 16, 3072),
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "Qwen3-32B": {**_QWEN3, **_sizes(5120, 64, 64, 25600), "max_window_layers": 64},
    "gemma-2-2b-it": {
        **_GEMMA2,
        **_sizes(2304, 26, 8, 9216),
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
    },
    "gemma-2-9b": {
        **_GEMMA2,
        **_sizes(3584, 42, 16, 14336),
        "eos_token_id": 1,
        "head_dim": 256,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
    },
    "gemma-2-27b-it": {
        **_GEMMA2,
        **_sizes(4608, 46, 32, 36864),
        "_attn_implementation": "eager",
        "head_dim": 128,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "sliding_window_size": 4096,
        "use_cache": True,
    },
    "gemma-3-270m-it": {
        **_GEMMA3,
        "_sliding_window_pattern": 6,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        "num_hidden_layers": 18,
        "use_bidirectional_attention": False,
    },
    "gemma-3-1b-it": {
        **_GEMMA3,
        "cache_implementation": "hybrid",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
    },
}
"""By name."""
