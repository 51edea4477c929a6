"""`config.json` of well-known models, as far as a family reads it, and their published sizes.

Written down from the models' cards and papers; no file is theirs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertmesh.families import FAMILIES

Config = dict[str, Any]


@dataclass(frozen=True)
class PublishedModel:
    """A model and what is known of its size."""

    name: str
    model_type: str
    total_b: float
    """Parameters in billions, as published: with embeddings, without modules for speculation."""
    active_b: float
    """Of these, per token."""
    sizes: Config = field(hash=False)
    active_has_embedding: bool = True
    """Whether the published number counts the input embedding."""

    @property
    def config_json(self) -> Config:
        """What `config.json` holds."""
        common = {
            "architectures": [FAMILIES[self.model_type].architecture],
            "model_type": self.model_type,
            "torch_dtype": "bfloat16",
        }
        return {**common, **self.sizes}

    def save(self, folder: Path) -> Path:
        """A folder with `config.json` and nothing else."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config_json))
        return folder


def _model(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    neurons: int,
    vocabulary: int,
    **more: object,
) -> Config:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": neurons,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **more,
    }


def _alternating(first: str, second: str, layers: int) -> list[str]:
    return [f"{(first, second)[i % 2]}_attention" for i in range(layers)]


def _five_to_one(layers: int) -> list[str]:
    return ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]


_GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "rope_theta": 1e4,
    "rope_scaling": _YARN,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
}
_DEEPSEEK_V2 = {
    **_DEEPSEEK,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
_QWEN3_MOE = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _gpt_oss(layers: int, experts: int) -> Config:
    return _model(
        *(2880, layers, 64, 8, 2880, 201088),
        num_local_experts=experts,
        num_experts_per_tok=4,
        experts_per_token=4,
        head_dim=64,
        sliding_window=128,
        attention_bias=True,
        swiglu_limit=7.0,
        layer_types=_alternating("sliding", "full", layers),
        rms_norm_eps=1e-5,
        rope_theta=150000,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        max_position_embeddings=131072,
    )


def _mimo() -> Config:
    full = {0, *range(5, 48, 6)}
    return _model(
        *(4096, 48, 64, 4, 16384, 152576),
        head_dim=192,
        v_head_dim=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        sliding_window_size=128,
        hybrid_layer_pattern=[int(i not in full) for i in range(48)],
        moe_layer_freq=[int(i > 0) for i in range(48)],
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=1,
        topk_group=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=None,
        attention_bias=False,
        attention_value_scale=0.707,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        partial_rotary_factor=0.334,
        rope_theta=5000000,
        swa_rope_theta=10000,
        rms_norm_eps=1e-5,
        layernorm_epsilon=1e-5,
        hidden_act="silu",
        tie_word_embeddings=False,
        max_position_embeddings=262144,
    )


PUBLISHED = (
    PublishedModel(
        *("Llama-3.1-8B", "llama", 8.03, 8.03),
        _model(4096, 32, 32, 8, 14336, 128256, rms_norm_eps=1e-5, rope_theta=500000.0),
    ),
    PublishedModel(
        *("Llama-3.2-1B", "llama", 1.24, 1.24),
        _model(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    ),
    PublishedModel(
        *("Mistral-7B-v0.1", "mistral", 7.24, 7.24),
        _model(4096, 32, 32, 8, 14336, 32000, sliding_window=4096, rms_norm_eps=1e-5),
    ),
    PublishedModel(
        *("Mixtral-8x7B-v0.1", "mixtral", 46.7, 12.9),
        _model(
            *(4096, 32, 32, 8, 14336, 32000),
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
    ),
    PublishedModel(
        *("Mixtral-8x22B-v0.1", "mixtral", 140.6, 39.1),
        _model(6144, 56, 48, 8, 16384, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    PublishedModel(
        *("Qwen2.5-0.5B", "qwen2", 0.49, 0.49),
        _model(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True, use_sliding_window=False),
    ),
    PublishedModel(
        *("Qwen2.5-7B", "qwen2", 7.62, 7.62),
        _model(3584, 28, 28, 4, 18944, 152064, use_sliding_window=False),
    ),
    PublishedModel(
        *("Qwen3-0.6B", "qwen3", 0.6, 0.6),
        _model(1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
    ),
    PublishedModel(
        *("Qwen3-8B", "qwen3", 8.2, 8.2),
        _model(4096, 36, 32, 8, 12288, 151936, head_dim=128, tie_word_embeddings=False),
    ),
    PublishedModel(
        *("gemma-2-2b", "gemma2", 2.61, 2.61),
        _model(
            2304,
            26,
            8,
            4,
            9216,
            256000,
            **_GEMMA2 | {"head_dim": 256, "query_pre_attn_scalar": 256},
        ),
    ),
    PublishedModel(
        *("gemma-2-27b", "gemma2", 27.2, 27.2),
        _model(
            *(4608, 46, 32, 16, 36864, 256000), head_dim=128, query_pre_attn_scalar=144, **_GEMMA2
        ),
    ),
    PublishedModel(
        *("gemma-3-270m", "gemma3_text", 0.268, 0.268),
        _model(640, 18, 4, 1, 2048, 262144, layer_types=_five_to_one(18), **_GEMMA3),
    ),
    PublishedModel(
        *("gemma-3-1b", "gemma3_text", 1.0, 1.0),
        _model(1152, 26, 4, 1, 6912, 262144, sliding_window_pattern=6, **_GEMMA3),
    ),
    PublishedModel(
        *("Qwen1.5-MoE-A2.7B", "qwen2_moe", 14.3, 2.7),
        _model(
            *(2048, 24, 16, 16, 5632, 151936),
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            use_sliding_window=False,
        ),
    ),
    PublishedModel(
        *("Qwen2-57B-A14B", "qwen2_moe", 57.4, 14.2),
        _model(
            *(3584, 28, 28, 4, 18944, 151936),
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            use_sliding_window=False,
        ),
    ),
    PublishedModel(
        *("Qwen3-30B-A3B", "qwen3_moe", 30.5, 3.3),
        _model(2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **_QWEN3_MOE),
    ),
    PublishedModel(
        *("Qwen3-235B-A22B", "qwen3_moe", 235, 22),
        _model(4096, 94, 64, 4, 12288, 151936, moe_intermediate_size=1536, **_QWEN3_MOE),
    ),
    PublishedModel(
        *("OLMoE-1B-7B", "olmoe", 6.9, 1.3),
        _model(
            *(2048, 16, 16, 16, 1024, 50304),
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            clip_qkv=None,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            max_position_embeddings=4096,
        ),
    ),
    PublishedModel(
        *("DeepSeek-V2-Lite", "deepseek_v2", 15.7, 2.4),
        _model(2048, 27, 16, 16, 10944, 102400, **_DEEPSEEK_V2)
        | {
            "q_lora_rank": None,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        active_has_embedding=False,
    ),
    PublishedModel(
        *("DeepSeek-V2", "deepseek_v2", 236, 21),
        _model(5120, 60, 128, 128, 12288, 102400, **_DEEPSEEK_V2)
        | {
            "q_lora_rank": 1536,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
    ),
    PublishedModel(
        *("DeepSeek-V3", "deepseek_v3", 671, 37),
        _model(7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK_V3)
        | {
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        active_has_embedding=False,
    ),
    PublishedModel(
        *("Kimi-K2", "kimi_k2", 1026, 32),
        _model(7168, 61, 64, 64, 18432, 163840, **_DEEPSEEK_V3)
        | {
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0,
        },
        active_has_embedding=False,
    ),
    PublishedModel(
        *("gpt-oss-20b", "gpt_oss", 20.91, 3.61), _gpt_oss(24, 32), active_has_embedding=False
    ),
    PublishedModel(
        *("gpt-oss-120b", "gpt_oss", 116.83, 5.13), _gpt_oss(36, 128), active_has_embedding=False
    ),
    PublishedModel("MiMo-V2-Flash", "mimo_v2_flash", 309, 15, _mimo()),
)
