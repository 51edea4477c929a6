"""Tiny random checkpoints of every family, made by transformers, with all of their options in use.

Weights are drawn wide, so that logits are peaked and a wrong expert, row or position changes
tokens. Nothing keeps its neutral value: norms, biases, sinks and the gates' biases are random too.
Windows are shorter than prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.hub_families import transformers_type

VOCAB_SIZE = 96
WINDOW = 10
_LINEAR_STD = 0.3

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}

_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}

_V3: dict[str, object] = _LATENT | {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}


@dataclass(frozen=True)
class TinyFamily:
    """A family with options."""

    model_type: str
    options: Mapping[str, object] = field(default_factory=dict)
    """Over the common sizes."""

    @property
    def has_experts(self) -> bool:
        """Whether there are MoE layers."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(name in self.options for name in names)


CASES: dict[str, TinyFamily] = {
    "llama": TinyFamily(
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": TinyFamily("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": TinyFamily(
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": TinyFamily("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma2": TinyFamily(
        "gemma2",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": TinyFamily(
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": TinyFamily(
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen2_moe": TinyFamily(
        "qwen2_moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": TinyFamily(
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "olmoe": TinyFamily(
        "olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "norm_topk_prob": False,
            "clip_qkv": 1.2,
        },
    ),
    "deepseek_v2": TinyFamily(
        "deepseek_v2",
        _LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v2-lite": TinyFamily(
        "deepseek_v2",
        _LATENT | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
    ),
    "deepseek_v3": TinyFamily("deepseek_v3", _V3),
    "kimi_k2": TinyFamily("kimi_k2", _V3 | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "gpt_oss": TinyFamily(
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 2.0,
            "rope_parameters": _YARN | {"rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "mimo_v2_flash": TinyFamily(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 24,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
}
"""By name; every family at least once."""


def save_family(folder: Path, case: TinyFamily) -> Path:
    """Writes a checkpoint as transformers knows it into `folder`, and returns it."""
    made_as = transformers_type(case.model_type)
    config = AutoConfig.for_model(made_as, **(_COMMON | dict(case.options)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model)
    model.eval().float().save_pretrained(folder)
    return folder


def served_folder(folder: Path, reference: Path, case: TinyFamily) -> Path:
    """The checkpoint under the name of its family: `reference` itself if it has that name."""
    if case.model_type == transformers_type(case.model_type):
        return reference
    shutil.copytree(reference, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": case.model_type}))
    return folder


def randomize(model: torch.nn.Module, std: float = _LINEAR_STD) -> None:
    """Draws every parameter, and every buffer that is saved; matrices with this deviation."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            draw = torch.randn(tensor.shape)
            if name.endswith("norm.weight"):
                around = tensor.mean()  # 1, or 0 where the factor is 1 + weight
                tensor.copy_(around + 0.2 * draw)
            elif tensor.ndim == 1:
                tensor.copy_(0.5 * draw)
            else:
                tensor.copy_(std * draw)
