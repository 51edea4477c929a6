"""OLMoE: every FFN is experts; queries and keys are normalised whole, then clipped with values."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import LayerConfig, ModelConfig, MoeFfnConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    reader.refuse("sliding_window")
    bias = reader.boolean("attention_bias")
    attention = replace(
        common.parse_attention(reader),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="whole",
        qkv_clip=reader.optional_number("clip_qkv", 1e-6, 1e9),
    )
    if attention.q_size != common.hidden_size(reader):
        # The norm of the queries has the width of the residual stream.
        reader.fail("head_dim", "hidden_size / num_attention_heads")
    experts = common.spelling(reader, "num_experts", "num_local_experts")
    renormalize = reader.boolean("norm_topk_prob")
    gate = common.parse_softmax_gate(reader, experts, renormalize=renormalize)
    ffn = MoeFfnConfig(gate, common.intermediate_size(reader), common.parse_activation(reader))
    return common.parse_model(reader, [LayerConfig(attention, ffn)] * common.num_layers(reader))


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        *tensors.ATTENTION_AND_NORMS,
        *tensors.gate("mlp.gate"),
    ),
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **common.BASE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
    tiny={
        **tiny.TINY,
        "hidden_size": 96,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "clip_qkv": 2.0,
    },
)
