"""What Gemma 2 and Gemma 3 have in common."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common, tensors
from expertmesh.families.config_reader import ConfigReader
from expertmesh.model_config import DenseFfnConfig, GqaConfig, LayerConfig, ModelConfig, NormConfig

DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

LAYER_PARAMETERS = (
    tensors.INPUT_NORM,
    *tensors.GQA,
    tensors.one(
        "layers.{layer}.attention_out_norm",
        tensors.LAYER + "post_attention_layernorm.weight",
        "H",
    ),
    tensors.one("layers.{layer}.ffn_norm", tensors.LAYER + "pre_feedforward_layernorm.weight", "H"),
    *tensors.DENSE_FFN,
    tensors.one(
        "layers.{layer}.ffn_out_norm", tensors.LAYER + "post_feedforward_layernorm.weight", "H"
    ),
)


def special_attention(reader: ConfigReader, base: GqaConfig) -> GqaConfig:
    """Attention with the scale of the config instead of that of the head size."""
    bias = reader.boolean("attention_bias")
    scalar = reader.number("query_pre_attn_scalar", 1e-3, 1e6)
    return replace(base, scale=scalar**-0.5, qkv_bias=bias, o_bias=bias)


def layer(reader: ConfigReader, attention: GqaConfig) -> LayerConfig:
    """A layer with a norm before and after attention and FFN."""
    activation = common.parse_activation(reader, "hidden_activation")
    ffn = DenseFfnConfig(common.intermediate_size(reader), activation)
    return LayerConfig(attention, ffn, out_norms=True)


def parse_model(reader: ConfigReader, layers: list[LayerConfig]) -> ModelConfig:
    """A model whose embeddings are scaled and whose norms have an offset of one."""
    reader.refuse("use_bidirectional_attention")
    return common.parse_model(
        reader,
        layers,
        norm=NormConfig(common.norm_eps(reader), unit_offset=True, round_first=False),
        embedding_scale=common.hidden_size(reader) ** 0.5,
        logits_softcap=softcap(reader, "final_logit_softcapping"),
    )


def softcap(reader: ConfigReader, key: str) -> float | None:
    """A cap, or None."""
    return reader.optional_number(key, 1e-3, 1e6)
