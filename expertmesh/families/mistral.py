"""Mistral: dense decoder whose layers all have a sliding window, or none of them."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import LayerConfig, ModelConfig


def _parse_config(reader: ConfigReader) -> ModelConfig:
    # transformers has another class for windows in some layers only.
    reader.refuse("layer_types")
    attention = replace(
        common.parse_attention(reader), sliding_window=common.optional_window(reader)
    )
    layer = LayerConfig(attention, common.parse_dense_ffn(reader))
    return common.parse_model(reader, [layer] * common.num_layers(reader))


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=tensors.DENSE_LAYER,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **common.BASE_DEFAULTS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tiny={**tiny.TINY, "num_hidden_layers": 2, "sliding_window": 12},
)
