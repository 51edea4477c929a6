"""MiMo-V2-Flash: most layers have a window, sinks and twice the key heads; values are smaller.

Configs come in two spellings. Files on the hub have `hybrid_layer_pattern`, `moe_layer_freq`,
`swa_*`, `sliding_window_size`, `layernorm_epsilon`; transformers has `layer_types`,
`mlp_layer_types`, `rope_parameters` for each type of layers, `sliding_window`, `rms_norm_eps`.

The window is the number of keys that a query sees, itself included. `sliding_window_size: 128`
means 129 of them: 128 before the query and the query, as transformers (5.23) and SGLang have it
and as its own files then say (`sliding_window: 129`). vLLM has 128 keys.
"""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, deepseek, tensors, tiny
from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rope import MAX_POSITIONS, parse_section, rope_of_layer_type
from expertmesh.families.rules import Family, Ignored
from expertmesh.model_config import (
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
)

_FULL_THETA, _LOCAL_THETA = 5e6, 1e4
_PARTIAL_ROTARY = 0.334


def _parse_config(reader: ConfigReader) -> ModelConfig:
    reader.refuse("attention_projection_layout", unless=(None, "split"))
    reader.refuse("n_shared_experts", unless=(None, 0))
    full, local = _parse_full_attention(reader), _parse_local_attention(reader)
    dense, moe = common.parse_dense_ffn(reader), _parse_moe(reader)
    layers = [
        LayerConfig(local if is_local else full, moe if is_sparse else dense)
        for is_local, is_sparse in zip(_sliding_layers(reader), _sparse_layers(reader), strict=True)
    ]
    eps = common.norm_eps(reader, common.spelling(reader, "rms_norm_eps", "layernorm_epsilon"))
    return common.parse_model(reader, layers, norm=NormConfig(eps))


def _sliding_layers(reader: ConfigReader) -> list[bool]:
    flags = reader.flags("hybrid_layer_pattern", common.num_layers(reader))
    if flags is None:
        return common.sliding_layers(reader, lambda i: i > 0 and (i + 1) % 6 != 0)
    sliding = common.sliding_layers(reader, lambda i: flags[i])
    if sliding != list(flags):
        reader.fail("hybrid_layer_pattern", "the same layers as layer_types")
    return sliding


def _sparse_layers(reader: ConfigReader) -> list[bool]:
    num_layers = common.num_layers(reader)
    types = reader.choices("mlp_layer_types", num_layers, ("dense", "sparse"))
    flags = reader.flags("moe_layer_freq", num_layers)
    named = None if types is None else tuple(kind == "sparse" for kind in types)
    if named is not None and flags is not None and named != flags:
        reader.fail("moe_layer_freq", "the same layers as mlp_layer_types")
    return list(named or flags or (i > 0 for i in range(num_layers)))


def _parse_full_attention(reader: ConfigReader) -> GqaConfig:
    num_heads, num_kv_heads = common.parse_heads(
        reader, "num_attention_heads", "num_key_value_heads"
    )
    head_dim = _head_dim(reader, "head_dim")
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_parse_rope(reader, "full_attention", head_dim, "rope_theta", _FULL_THETA),
        scale=head_dim**-0.5,
        qkv_bias=reader.boolean("attention_bias"),
        value_head_dim=_head_dim(reader, "v_head_dim"),
        value_scale=reader.number("attention_value_scale", 1e-6, 1e6, 1.0),
        sinks=reader.boolean("add_full_attention_sink_bias", False),
    )


def _parse_local_attention(reader: ConfigReader) -> GqaConfig:
    """Attention of layers with a window: as that of the others where the config does not differ."""
    full = _parse_full_attention(reader)
    own = replace(
        reader,
        defaults={
            **reader.defaults,
            "swa_num_attention_heads": full.num_heads,
            "swa_num_key_value_heads": 2 * full.num_kv_heads,
            "swa_head_dim": full.head_dim,
            "swa_v_head_dim": full.value_dim,
        },
    )
    num_heads, num_kv_heads = common.parse_heads(
        own, "swa_num_attention_heads", "swa_num_key_value_heads"
    )
    head_dim = _head_dim(own, "swa_head_dim")
    return replace(
        full,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_parse_rope(reader, "sliding_attention", head_dim, "swa_rope_theta", _LOCAL_THETA),
        scale=head_dim**-0.5,
        sliding_window=_window(reader),
        value_head_dim=_head_dim(own, "swa_v_head_dim"),
        sinks=reader.boolean("add_swa_attention_sink_bias", True),
    )


def _head_dim(reader: ConfigReader, key: str) -> int:
    return reader.integer(key, 1, common.MAX_HEAD_DIM)


def _window(reader: ConfigReader) -> int:
    """See above: the older key counts the keys before the query."""
    before = reader.optional_integer("sliding_window_size", 1, MAX_POSITIONS - 1)
    return common.sliding_window(reader) if before is None else before + 1


def _parse_rope(
    reader: ConfigReader, layer_type: str, head_dim: int, theta_key: str, theta: float
) -> RopeConfig:
    """A rope over the first part of each head."""
    scaling = reader.child("rope_scaling")
    if scaling is not None:
        scaling.choice("rope_type", ("default",), "default")
        scaling.choice("type", ("default",), "default")
    section = rope_of_layer_type(reader, layer_type)
    factor = reader.number("partial_rotary_factor", 0.0, 1.0, _PARTIAL_ROTARY)
    dim = int(head_dim * section.number("partial_rotary_factor", 0.0, 1.0, factor))
    if dim == 0 or dim % 2:
        section.fail("partial_rotary_factor", f"an even part of {head_dim} dimensions, not {dim}")
    outer_theta = reader.number(theta_key, 1.0, 1e12, theta)
    return parse_section(reader, section, dim, outer_theta, partial=True)


def _parse_moe(reader: ConfigReader) -> MoeFfnConfig:
    experts = common.spelling(reader, "n_routed_experts", "num_local_experts")
    wide = common.intermediate_size(reader, "moe_intermediate_size")
    gate = deepseek.sigmoid_gate(reader, experts)
    return MoeFfnConfig(gate, wide, common.parse_activation(reader))


MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    parse_config=_parse_config,
    model_parameters=tensors.MODEL,
    layer_parameters=(
        tensors.INPUT_NORM,
        *tensors.gqa("attention_sink_bias", "sinks"),
        tensors.FFN_NORM,
        *tensors.DENSE_FFN,
        *tensors.gate("mlp.gate"),
    ),
    expert_layouts=tensors.MLP_EXPERTS,
    ignored=(
        tensors.ROTARY_BUFFERS,
        Ignored("model.mtp.", "", "modules that predict further tokens (MTP) are not used"),
    ),
    defaults={
        **common.BASE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "bos_token_id": 1,
    },
    tiny={
        **tiny.TINY,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 13,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
)
