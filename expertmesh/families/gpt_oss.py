"""gpt-oss: sinks, every other layer a window, experts with biases and a clamped SwiGLU.

Experts are stored stacked, transposed, with gate and up in turns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rope import parse_rope
from expertmesh.families.rules import ExpertLayout, Family
from expertmesh.model_config import (
    Activation,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
)

_EXPERTS = tensors.MLP + "experts."


def _parse_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias", True)
    rope_of = partial(parse_rope, default_theta=150_000.0)
    attention = replace(
        common.parse_attention(reader, rope_of), qkv_bias=bias, o_bias=bias, sinks=True
    )
    ffn = _parse_ffn(reader)
    sliding = common.sliding_layers(reader, lambda i: i % 2 == 0)
    layers = [
        LayerConfig(replace(attention, sliding_window=window), ffn)
        for window in common.windows(reader, sliding)
    ]
    norm = NormConfig(common.norm_eps(reader), round_first=False)
    return common.parse_model(reader, layers, norm=norm)


def _parse_ffn(reader: ConfigReader) -> MoeFfnConfig:
    experts = common.spelling(reader, "num_local_experts", "num_experts")
    gate = common.parse_softmax_gate(reader, experts, renormalize=True)
    activation = Activation(
        "clamped_swiglu",
        alpha=reader.number("swiglu_alpha", 1e-3, 1e3),
        limit=reader.number("swiglu_limit", 1e-3, 1e6),
    )
    return MoeFfnConfig(
        replace(gate, bias=True), common.intermediate_size(reader), activation, bias=True
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        *tensors.ATTENTION_AND_NORMS,
        *tensors.gate("mlp.router"),
    ),
    expert_layouts=(
        ExpertLayout(
            gate_up=(_EXPERTS + "gate_up_proj",),
            down=_EXPERTS + "down_proj",
            gate_up_bias=_EXPERTS + "gate_up_proj_bias",
            down_bias=_EXPERTS + "down_proj_bias",
            transposed=True,
            interleaved=True,
        ),
    ),
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        "torch_dtype": "bfloat16",  # released files say nothing of it
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    tiny={
        **tiny.TINY,
        "hidden_size": 64,  # MXFP4 has blocks of 32
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "sliding_window": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
)
