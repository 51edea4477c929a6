"""Qwen3: dense decoder with norms of each query and key head; upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, qwen, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias")
    attention = replace(common.parse_attention(reader), qkv_bias=bias, o_bias=bias, qk_norm="head")
    return qwen.parse_dense_model(reader, attention)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=tensors.DENSE_LAYER,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={**qwen.DENSE_DEFAULTS, "head_dim": 128},
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
    },
)
