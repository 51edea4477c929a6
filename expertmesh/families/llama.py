"""Llama: dense decoder (also SmolLM, TinyLlama, Yi and other exports with this `model_type`)."""

from __future__ import annotations

from expertmesh.families import common
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family, ParameterTemplate, Source
from expertmesh.model_config import DenseFfnConfig, LayerConfig, ModelConfig

_MLP = "model.layers.{layer}.mlp."


def _parse_config(reader: ConfigReader) -> ModelConfig:
    attention = common.parse_attention(
        reader,
        default_theta=1e4,
        bias=reader.boolean("attention_bias", False),
        sliding_window=None,
    )
    ffn = DenseFfnConfig(
        common.intermediate_size(reader),
        common.check_activation(reader),
        bias=reader.boolean("mlp_bias", False),
    )
    return common.parse_model(reader, attention, ffn, default_eps=1e-6)


def _has_bias(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, DenseFfnConfig) and layer.ffn.bias


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parse_config=_parse_config,
    model_parameters=common.MODEL_PARAMETERS,
    layer_parameters=(
        *common.ATTENTION_PARAMETERS,
        ParameterTemplate(
            "layers.{layer}.gate_up",
            (
                Source((_MLP + "gate_proj.weight",), "IH"),
                Source((_MLP + "up_proj.weight",), "IH"),
            ),
        ),
        ParameterTemplate(
            "layers.{layer}.gate_up_bias",
            (Source((_MLP + "gate_proj.bias",), "I"), Source((_MLP + "up_proj.bias",), "I")),
            when=_has_bias,
        ),
        common.one("layers.{layer}.down", _MLP + "down_proj.weight", "HI"),
        ParameterTemplate(
            "layers.{layer}.down_bias", (Source((_MLP + "down_proj.bias",), "H"),), when=_has_bias
        ),
    ),
    ignored=common.ROTARY_BUFFERS,
)
