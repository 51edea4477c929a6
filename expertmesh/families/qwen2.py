"""Qwen2 and Qwen2.5: dense decoder with biases of q, k and v; upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, qwen, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    attention = replace(common.parse_attention(reader), qkv_bias=True)
    return qwen.parse_dense_model(reader, attention)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=tensors.DENSE_LAYER,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults=qwen.DENSE_DEFAULTS,
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
    },
)
