"""Mixtral: every FFN is E experts behind a softmax gate whose top-k weights are renormalised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rope import parse_rope
from expertmesh.families.rules import ExpertLayout, Family
from expertmesh.model_config import LayerConfig, ModelConfig, MoeFfnConfig

_MOE = tensors.LAYER + "block_sparse_moe."


def _parse_config(reader: ConfigReader) -> ModelConfig:
    rope_of = partial(parse_rope, default_theta=1e6)
    attention = replace(
        common.parse_attention(reader, rope_of), sliding_window=common.optional_window(reader)
    )
    experts = common.spelling(reader, "num_local_experts", "num_experts")
    gate = common.parse_softmax_gate(reader, experts, renormalize=True)
    ffn = MoeFfnConfig(gate, common.intermediate_size(reader), common.parse_activation(reader))
    return common.parse_model(reader, [LayerConfig(attention, ffn)] * common.num_layers(reader))


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        *tensors.ATTENTION_AND_NORMS,
        *tensors.gate("block_sparse_moe.gate", "mlp.gate"),
    ),
    expert_layouts=(
        ExpertLayout(
            gate_up=(_MOE + "experts.{expert}.w1.weight", _MOE + "experts.{expert}.w3.weight"),
            down=_MOE + "experts.{expert}.w2.weight",
        ),
        tensors.STACKED_EXPERTS,
        ExpertLayout(gate_up=(_MOE + "experts.gate_up_proj",), down=_MOE + "experts.down_proj"),
    ),
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **common.BASE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
)
