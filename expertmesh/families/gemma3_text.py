"""Gemma 3, text only: five layers with a window and a rope of their own to one with full attention.

`sliding_window_pattern` is the older spelling of `layer_types`, `rope_local_base_freq` that of the
rope of the layers with a window.
"""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, gemma, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rope import parse_section, rope_of_layer_type
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig, RopeConfig

_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4


def _parse_config(reader: ConfigReader) -> ModelConfig:
    # transformers stores this one and computes without it.
    reader.refuse("attn_logit_softcapping")
    base = gemma.special_attention(reader, common.parse_attention(reader, _full_rope))
    attention = replace(base, qk_norm="head")
    local = replace(attention, rope=_local_rope(reader, base.head_dim))
    pattern = reader.integer("sliding_window_pattern", 1, common.MAX_LAYERS)
    sliding = common.sliding_layers(reader, lambda i: (i + 1) % pattern != 0)
    layers = [
        gemma.layer(reader, replace(local, sliding_window=window) if window else attention)
        for window in common.windows(reader, sliding)
    ]
    return gemma.parse_model(reader, layers)


def _full_rope(reader: ConfigReader, dim: int) -> RopeConfig:
    """An old `rope_scaling` is of the layers with full attention."""
    section = rope_of_layer_type(reader, "full_attention")
    scaling = reader.child("rope_scaling")
    if scaling is not None:
        section = replace(scaling, raw={**section.raw, **scaling.raw})
    theta = reader.number("rope_theta", 1.0, 1e12, _GLOBAL_THETA)
    return parse_section(reader, section, dim, theta)


def _local_rope(reader: ConfigReader, dim: int) -> RopeConfig:
    section = rope_of_layer_type(reader, "sliding_attention")
    theta = reader.number("rope_local_base_freq", 1.0, 1e12, _LOCAL_THETA)
    return parse_section(reader, section, dim, theta)


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=gemma.LAYER_PARAMETERS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **gemma.DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)
