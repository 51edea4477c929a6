"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): routed experts beside a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, qwen, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig, SharedExpertConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("qkv_bias", True)
    attention = replace(common.parse_attention(reader), qkv_bias=bias)
    shared = common.intermediate_size(reader, "shared_expert_intermediate_size")
    moe = replace(
        qwen.moe_ffn(reader, "num_experts"), shared=SharedExpertConfig(shared, gated=True)
    )
    return qwen.parse_moe_model(reader, attention, moe, qwen.alternate_windows(reader))


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        *tensors.DENSE_LAYER,
        *tensors.gate("mlp.gate"),
        *tensors.shared_expert("shared_expert", "shared_expert_gate"),
    ),
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **qwen.MOE_DEFAULTS,
        "max_window_layers": 28,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 3,
    },
)
