"""Holds our description of a layer against the modules that transformers makes of the config."""

from __future__ import annotations

from typing import Any

import pytest

from expertmesh.model_config import (
    GELU_TANH,
    SILU,
    Activation,
    AttentionConfig,
    DenseFfnConfig,
    GqaConfig,
    MlaConfig,
    MoeFfnConfig,
    SharedExpertConfig,
)


def check_attention(attention: AttentionConfig, module: Any) -> None:
    """Sizes, scale, window, biases and norms are those of a module of transformers."""
    assert attention.scale == pytest.approx(module.scaling, rel=1e-12)
    assert attention.out_size == module.o_proj.in_features
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window") and hasattr(module.config, "use_sliding_window"):
        assert attention.sliding_window is None  # of Qwen2-MoE, where full layers have no window
    elif hasattr(module, "sliding_window"):
        assert attention.sliding_window == window
    else:
        assert attention.sliding_window == getattr(module.config, "sliding_window", None)
    if isinstance(attention, MlaConfig):
        _check_mla(attention, module)
    else:
        _check_gqa(attention, module)


def _check_mla(attention: MlaConfig, module: Any) -> None:
    assert attention.latent_norm_eps == module.kv_a_layernorm.variance_epsilon
    assert attention.q_lora_rank == module.q_lora_rank
    assert attention.kv_lora_rank == module.kv_lora_rank
    assert attention.nope_head_dim == module.qk_nope_head_dim
    assert attention.rope_head_dim == module.qk_rope_head_dim
    assert attention.value_dim == module.v_head_dim
    assert attention.num_heads == module.num_heads
    assert attention.rope.interleaved == getattr(module.config, "rope_interleave", True)
    assert attention.bias == (module.kv_a_proj_with_mqa.bias is not None)


def _check_gqa(attention: GqaConfig, module: Any) -> None:
    assert attention.q_size == module.q_proj.out_features
    assert attention.k_size == module.k_proj.out_features
    assert attention.v_size == module.v_proj.out_features
    assert attention.head_dim == module.head_dim
    assert attention.num_heads // attention.num_kv_heads == module.num_key_value_groups
    assert attention.qkv_bias == (module.q_proj.bias is not None)
    assert attention.o_bias == (module.o_proj.bias is not None)
    assert attention.sinks == (getattr(module, "sinks", None) is not None)
    assert attention.value_scale == getattr(module, "v_scale", 1.0)
    assert attention.softcap == getattr(module, "attn_logit_softcapping", None)
    assert attention.qkv_clip == getattr(module.config, "clip_qkv", None)
    norm = getattr(module, "q_norm", None)
    if norm is None:
        assert attention.qk_norm == "none"
    else:
        width = {"head": attention.head_dim, "whole": attention.q_size}[attention.qk_norm]
        assert norm.weight.shape == (width,)


def check_ffn(ffn: DenseFfnConfig | MoeFfnConfig, module: Any) -> None:
    """Sizes, activation, gate and shared expert are those of a module of transformers."""
    if isinstance(ffn, DenseFfnConfig):
        assert module.gate_proj.out_features == ffn.intermediate_size
        assert (module.gate_proj.bias is not None) == ffn.bias
        _check_activation(ffn.activation, module.act_fn)
        return
    experts = module.experts
    wide = getattr(experts, "intermediate_size", getattr(experts, "intermediate_dim", None))
    assert ffn.intermediate_size == wide
    if ffn.bias:
        assert ffn.activation == Activation("clamped_swiglu", experts.alpha, experts.limit)
    else:
        _check_activation(ffn.activation, experts.act_fn)
    _check_gate(ffn, getattr(module, "router", None) or module.gate)
    shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
    expected = None
    if shared is not None:
        gated = hasattr(module, "shared_expert_gate")
        expected = SharedExpertConfig(shared.gate_proj.out_features, gated)
    assert ffn.shared == expected


def _check_activation(activation: Activation, function: Any) -> None:
    kinds = {"SiLUActivation": SILU, "GELUTanh": GELU_TANH}
    assert activation == kinds[type(function).__name__]


def _check_gate(ffn: MoeFfnConfig, module: Any) -> None:
    gate = ffn.gate
    assert gate.num_experts == module.num_experts == ffn.num_experts
    assert gate.top_k == module.top_k
    assert gate.bias == hasattr(module, "bias")
    assert gate.selection_bias == hasattr(module, "e_score_correction_bias")
    assert gate.scale == getattr(module, "routed_scaling_factor", 1.0)
    grouped = getattr(module, "topk_method", "grouped") != "greedy"
    groups = getattr(module, "num_group", 1) if grouped else 1
    assert (gate.num_groups, gate.top_groups) == (
        groups,
        module.topk_group if groups > 1 else 1,
    )
    # Families without the key renormalise, but for DeepSeek-V2.
    renormalizes = getattr(module, "norm_topk_prob", not hasattr(module, "topk_method"))
    assert gate.renormalize == renormalizes
