"""What DeepSeek-V2, DeepSeek-V3 and Kimi-K2 have in common: latent attention, experts in groups."""

from __future__ import annotations

from functools import partial

from expertmesh.families import common, tensors, tiny
from expertmesh.families.config_reader import ConfigReader, Json
from expertmesh.families.rope import parse_rope, rope_section, yarn_mscale
from expertmesh.families.rules import Ignored
from expertmesh.model_config import (
    GateConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
    SharedExpertConfig,
)

DEFAULTS: dict[str, object] = {
    **common.BASE_DEFAULTS,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

LAYER_PARAMETERS = (
    tensors.INPUT_NORM,
    *tensors.MLA,
    tensors.FFN_NORM,
    *tensors.DENSE_FFN,
    *tensors.gate("mlp.gate"),
    *tensors.shared_expert("shared_experts"),
)

IGNORED = (
    tensors.ROTARY_BUFFERS,
    Ignored(
        "model.layers.{num_layers}.",
        "",
        "the module that predicts a second token (MTP); served models do not use it",
        only_with="model.layers.{num_layers}.eh_proj.weight",
    ),
)

TINY: Json = {
    **tiny.TINY,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def parse_model(reader: ConfigReader, gate: GateConfig, *, interleaved: bool) -> ModelConfig:
    """A model with this gate, whose first layers are dense."""
    if reader.integer("moe_layer_freq", 1, common.MAX_LAYERS, 1) != 1:
        reader.fail("moe_layer_freq", "1", fix="anything else is not supported")
    attention = _parse_attention(reader, interleaved=interleaved)
    dense = common.parse_dense_ffn(reader)
    wide = common.intermediate_size(reader, "moe_intermediate_size")
    num_shared = reader.integer("n_shared_experts", 1, 1 << 10)
    moe = MoeFfnConfig(
        gate,
        wide,
        common.parse_activation(reader),
        shared=SharedExpertConfig(wide * num_shared),
    )
    num_layers = common.num_layers(reader)
    num_dense = reader.integer("first_k_dense_replace", 0, common.MAX_LAYERS)
    layers = [LayerConfig(attention, dense if i < num_dense else moe) for i in range(num_layers)]
    return common.parse_model(reader, layers)


def sigmoid_gate(reader: ConfigReader, experts_key: str) -> GateConfig:
    """Scores are sigmoids; a bias that balances load takes part in the choice only."""
    reader.choice("scoring_func", ("sigmoid",), "sigmoid")
    reader.choice("topk_method", ("noaux_tc",), "noaux_tc")
    num_experts = reader.integer(experts_key, 1, common.MAX_EXPERTS)
    num_groups, top_groups = parse_groups(reader, num_experts, least_size=2)
    return GateConfig(
        num_experts,
        common.top_k(reader, num_experts // num_groups * top_groups),
        scoring="sigmoid",
        renormalize=reader.boolean("norm_topk_prob"),
        renormalize_eps=1e-20,
        scale=reader.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        selection_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="top2_sum",
    )


def parse_groups(reader: ConfigReader, num_experts: int, *, least_size: int = 1) -> tuple[int, int]:
    """Groups of experts, and of how many of them a token's experts may be."""
    num_groups = reader.integer("n_group", 1, num_experts)
    if num_experts % num_groups or num_experts // num_groups < least_size:
        reader.fail("n_group", f"a divisor of {num_experts} experts, {least_size} a group or more")
    return num_groups, reader.integer("topk_group", 1, num_groups)


def _parse_attention(reader: ConfigReader, *, interleaved: bool) -> MlaConfig:
    num_heads = reader.integer("num_attention_heads", 1, common.MAX_HEADS)
    if reader.integer("num_key_value_heads", 1, common.MAX_HEADS, num_heads) != num_heads:
        reader.fail("num_key_value_heads", f"num_attention_heads={num_heads}")
    nope, rope_dim, value_dim = (
        reader.integer(key, 1, common.MAX_HEAD_DIM)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rope_dim % 2:
        reader.fail("qk_rope_head_dim", "an even size")
    rope = partial(parse_rope, interleaved=interleaved)
    return MlaConfig(
        num_heads=num_heads,
        q_lora_rank=reader.optional_integer("q_lora_rank", 1, common.MAX_WIDTH),
        kv_lora_rank=reader.integer("kv_lora_rank", 1, common.MAX_WIDTH),
        nope_head_dim=nope,
        rope_head_dim=rope_dim,
        value_dim=value_dim,
        rope=rope(reader, rope_dim),
        scale=(nope + rope_dim) ** -0.5 * _score_factor(reader),
        bias=reader.boolean("attention_bias"),
    )


def _score_factor(reader: ConfigReader) -> float:
    """A longer context makes scores larger; the class of rope does not matter for that."""
    section = rope_section(reader)
    if (section.text("rope_type") or section.text("type", "default")) == "default":
        return 1.0
    weight = section.number("mscale_all_dim", 0.0, 1e3, 0.0)
    return yarn_mscale(section.number("factor", 1e-3, 1e6), weight) ** 2 if weight else 1.0
