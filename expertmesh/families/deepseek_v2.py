"""DeepSeek-V2: latent attention, shared experts, softmax gate whose weights are not renormalised.

`topk_method` greedy takes the best experts, group_limited_greedy those of the best groups. With
`norm_topk_prob` the original code and transformers disagree, and no released model has it set, so
it is refused.
"""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, deepseek, tensors
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import Family
from expertmesh.model_config import GateConfig, ModelConfig

_METHODS = ("greedy", "group_limited_greedy")


def _parse_config(reader: ConfigReader) -> ModelConfig:
    reader.refuse("norm_topk_prob")
    reader.refuse("mlp_bias")
    reader.choice("scoring_func", ("softmax",), "softmax")
    return deepseek.parse_model(reader, _parse_gate(reader), interleaved=True)


def _parse_gate(reader: ConfigReader) -> GateConfig:
    experts = common.spelling(reader, "n_routed_experts", "num_experts")
    gate = replace(
        common.parse_softmax_gate(reader, experts, renormalize=False),
        scale=reader.number("routed_scaling_factor", 1e-6, 1e6),
    )
    if reader.choice("topk_method", _METHODS) == "greedy":
        return gate
    num_groups, top_groups = deepseek.parse_groups(reader, gate.num_experts)
    common.top_k(reader, gate.num_experts // num_groups * top_groups)
    return replace(gate, num_groups=num_groups, top_groups=top_groups)


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=deepseek.LAYER_PARAMETERS,
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=(tensors.ROTARY_BUFFERS,),
    defaults={
        **deepseek.DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    tiny={
        **deepseek.TINY,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    },
)
