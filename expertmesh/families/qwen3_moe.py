"""Qwen3-MoE: routed experts, a norm of each query and key head; a window in all layers or none."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, qwen, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias")
    attention = replace(common.parse_attention(reader), qkv_bias=bias, o_bias=bias, qk_norm="head")
    moe = qwen.moe_ffn(reader, common.spelling(reader, "num_experts", "num_local_experts"))
    windows = [qwen.same_window(reader)] * common.num_layers(reader)
    return qwen.parse_moe_model(reader, attention, moe, windows)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        *tensors.DENSE_LAYER,
        *tensors.gate("mlp.gate"),
    ),
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **qwen.MOE_DEFAULTS,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
)
