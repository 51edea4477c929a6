"""Llama: dense decoder (also SmolLM, TinyLlama, Yi and other exports with this `model_type`)."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import LayerConfig, ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias")
    attention = replace(common.parse_attention(reader), qkv_bias=bias, o_bias=bias)
    ffn = common.parse_dense_ffn(reader, bias=reader.boolean("mlp_bias"))
    return common.parse_model(reader, [LayerConfig(attention, ffn)] * common.num_layers(reader))


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=tensors.DENSE_LAYER,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **common.BASE_DEFAULTS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 2,
        "rope_parameters": tiny.LLAMA3_ROPE,
    },
)
