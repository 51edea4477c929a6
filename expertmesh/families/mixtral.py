"""Mixtral: every FFN is E experts behind a softmax gate whose top-k weights are renormalised."""

from __future__ import annotations

from expertmesh.families import common
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import ExpertLayout, Family, ParameterTemplate, Source
from expertmesh.model_config import GateConfig, ModelConfig, MoeFfnConfig

_LAYER = "model.layers.{layer}."


def _parse_config(reader: ConfigReader) -> ModelConfig:
    attention = common.parse_attention(
        reader,
        default_theta=1e6,
        bias=False,
        sliding_window=reader.optional_integer("sliding_window", 1, common.MAX_POSITIONS),
    )
    num_experts = reader.integer("num_local_experts", 1, common.MAX_EXPERTS, 8)
    gate = GateConfig(num_experts, reader.integer("num_experts_per_tok", 1, num_experts, 2))
    ffn = MoeFfnConfig(gate, common.intermediate_size(reader), common.check_activation(reader))
    return common.parse_model(reader, attention, ffn, default_eps=1e-5)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parse_config=_parse_config,
    model_parameters=common.MODEL_PARAMETERS,
    layer_parameters=(
        *common.ATTENTION_PARAMETERS,
        ParameterTemplate(
            "layers.{layer}.gate",
            (Source((_LAYER + "block_sparse_moe.gate.weight", _LAYER + "mlp.gate.weight"), "EH"),),
        ),
    ),
    expert_layouts=(
        ExpertLayout(
            gate_up=(
                _LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
                _LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
            ),
            down=_LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
        ),
        ExpertLayout(
            gate_up=(_LAYER + "mlp.experts.gate_up_proj",), down=_LAYER + "mlp.experts.down_proj"
        ),
        ExpertLayout(
            gate_up=(_LAYER + "block_sparse_moe.experts.gate_up_proj",),
            down=_LAYER + "block_sparse_moe.experts.down_proj",
        ),
    ),
    ignored=common.ROTARY_BUFFERS,
)
