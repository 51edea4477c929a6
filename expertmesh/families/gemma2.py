"""Gemma 2: norms around attention and FFN, capped scores and logits, every other layer a window."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, gemma, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    attention = replace(
        gemma.special_attention(reader, common.parse_attention(reader)),
        softcap=gemma.softcap(reader, "attn_logit_softcapping"),
    )
    sliding = common.sliding_layers(reader, lambda i: i % 2 == 0)
    layers = [
        gemma.layer(reader, replace(attention, sliding_window=window))
        for window in common.windows(reader, sliding)
    ]
    return gemma.parse_model(reader, layers)


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=gemma.LAYER_PARAMETERS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **gemma.DEFAULTS,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 20.0,
    },
)
