"""DeepSeek-V3 and R1: latent attention, sigmoid gate in groups with a bias for the choice."""

from __future__ import annotations

from expertmesh.families import common, deepseek, tensors
from expertmesh.families.config_reader import ConfigReader, Json
from expertmesh.families.rules import Family
from expertmesh.model_config import ModelConfig

DEFAULTS: dict[str, object] = {
    **deepseek.DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

TINY: Json = {**deepseek.TINY, "n_group": 4, "topk_group": 2}


def parse_config(reader: ConfigReader) -> ModelConfig:
    """The model."""
    experts = common.spelling(reader, "n_routed_experts", "num_local_experts")
    gate = deepseek.sigmoid_gate(reader, experts)
    return deepseek.parse_model(reader, gate, interleaved=reader.boolean("rope_interleave", True))


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    parse_config=parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=deepseek.LAYER_PARAMETERS,
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=deepseek.IGNORED,
    defaults=DEFAULTS,
    tiny=TINY,
)
