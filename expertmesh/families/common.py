"""What the families share: the usual config keys, rope in both spellings, the usual tensors."""

from __future__ import annotations

from typing import cast

from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rules import ParameterTemplate, Source
from expertmesh.model_config import (
    SILU,
    Activation,
    DenseFfnConfig,
    DtypeName,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
)

# Bounds: well above every public model, low enough that no product of them overflows 64 bits.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 27
MAX_EXPERTS = 1 << 14

ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")

ROTARY_BUFFERS = {"rotary_emb.inv_freq": "a buffer of old exports; recomputed from the config"}


def parse_model(
    reader: ConfigReader,
    attention: GqaConfig,
    ffn: DenseFfnConfig | MoeFfnConfig,
    *,
    default_eps: float,
) -> ModelConfig:
    """A model whose layers are all alike."""
    vocab_size = reader.integer("vocab_size", 1, MAX_VOCAB)
    num_layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    return ModelConfig(
        family=reader.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size(reader),
        layers=(LayerConfig(attention, ffn),) * num_layers,
        norm=NormConfig(reader.number("rms_norm_eps", 0.0, 1.0, default_eps)),
        max_position_embeddings=max_positions(reader),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        dtype=_dtype(reader),
        bos_token_id=reader.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=reader.integers("eos_token_id", 0, vocab_size - 1),
    )


def parse_attention(
    reader: ConfigReader, *, default_theta: float, bias: bool, sliding_window: int | None
) -> GqaConfig:
    """Grouped-query attention with rope over the whole head."""
    num_heads = reader.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = reader.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        reader.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = reader.optional_integer("head_dim", 2, MAX_HEAD_DIM)
    if head_dim is None:
        head_dim, rest = divmod(hidden_size(reader), num_heads)
        if rest:
            reader.fail("hidden_size", f"a multiple of num_attention_heads={num_heads}")
    if head_dim % 2 or head_dim == 0:
        reader.fail("head_dim", f"an even size, computed {head_dim}")
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=parse_rope(reader, head_dim, default_theta),
        scale=head_dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=sliding_window,
    )


def parse_rope(reader: ConfigReader, dim: int, default_theta: float) -> RopeConfig:
    """`rope_parameters`, or `rope_theta` and `rope_scaling` as files before transformers 5 have it.

    An old `rope_scaling` wins over `rope_parameters`, and a theta inside over one outside, as in
    transformers.
    """
    empty = ConfigReader(reader.path, {}, "rope_parameters.")
    inner = reader.child("rope_scaling") or reader.child("rope_parameters") or empty
    _check_full_rotation(reader, inner)
    kind = inner.text("rope_type") or inner.text("type") or "default"
    if kind not in ROPE_KINDS:
        key = "rope_type" if "rope_type" in inner.raw else "type"
        inner.fail(key, f"one of {', '.join(ROPE_KINDS)}", fix="this rope is not supported")
    theta = reader.number("rope_theta", 1.0, 1e12, default_theta)
    theta = inner.number("rope_theta", 1.0, 1e12, theta)
    if kind == "default":
        return RopeConfig(theta, dim)
    factor = inner.number("factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeConfig(theta, dim, "linear", factor)
    return _llama3_rope(reader, inner, RopeConfig(theta, dim, "llama3", factor))


def _llama3_rope(reader: ConfigReader, inner: ConfigReader, base: RopeConfig) -> RopeConfig:
    low = inner.number("low_freq_factor", 1e-3, 1e6)
    high = inner.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        inner.fail("high_freq_factor", f"more than low_freq_factor={low:g}")
    key = "original_max_position_embeddings"
    outer = reader.integer(key, 1, MAX_POSITIONS, max_positions(reader))
    original = inner.integer(key, 1, MAX_POSITIONS, outer)
    return RopeConfig(base.theta, base.dim, "llama3", base.factor, low, high, original)


def _check_full_rotation(*readers: ConfigReader) -> None:
    for reader in readers:
        if reader.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            reader.fail("partial_rotary_factor", "1 (rotation of the whole head)")


def hidden_size(reader: ConfigReader) -> int:
    """Width of the residual stream."""
    return reader.integer("hidden_size", 1, MAX_WIDTH)


def intermediate_size(reader: ConfigReader) -> int:
    """Width of an FFN."""
    return reader.integer("intermediate_size", 1, MAX_WIDTH)


def max_positions(reader: ConfigReader) -> int:
    """Longest context."""
    return reader.integer("max_position_embeddings", 1, MAX_POSITIONS)


def check_activation(reader: ConfigReader) -> Activation:
    """The activation; silu is the only one so far."""
    if reader.text("hidden_act", "silu") != "silu":
        reader.fail("hidden_act", "'silu'", fix="other activations are not supported")
    return SILU


def _dtype(reader: ConfigReader) -> DtypeName:
    key = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    name = reader.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        reader.fail(key, f"one of {', '.join(DTYPES)}")
    return cast(DtypeName, name)


def one(parameter: str, name: str, dims: str) -> ParameterTemplate:
    """A parameter that is one stored tensor."""
    return ParameterTemplate(parameter, (Source((name,), dims),))


_ATTENTION = "model.layers.{layer}.self_attn."

MODEL_PARAMETERS = (
    one("embed", "model.embed_tokens.weight", "VH"),
    one("norm", "model.norm.weight", "H"),
    one("lm_head", "lm_head.weight", "VH"),
)
"""Embedding first, then what comes after the layers."""

ATTENTION_PARAMETERS = (
    one("layers.{layer}.input_norm", "model.layers.{layer}.input_layernorm.weight", "H"),
    ParameterTemplate(
        "layers.{layer}.qkv",
        (
            Source((_ATTENTION + "q_proj.weight",), "QH"),
            Source((_ATTENTION + "k_proj.weight",), "KH"),
            Source((_ATTENTION + "v_proj.weight",), "KH"),
        ),
    ),
    ParameterTemplate(
        "layers.{layer}.qkv_bias",
        (
            Source((_ATTENTION + "q_proj.bias",), "Q"),
            Source((_ATTENTION + "k_proj.bias",), "K"),
            Source((_ATTENTION + "v_proj.bias",), "K"),
        ),
        when=lambda layer: layer.gqa.qkv_bias,
    ),
    one("layers.{layer}.o", _ATTENTION + "o_proj.weight", "HQ"),
    ParameterTemplate(
        "layers.{layer}.o_bias",
        (Source((_ATTENTION + "o_proj.bias",), "H"),),
        when=lambda layer: layer.gqa.o_bias,
    ),
    one(
        "layers.{layer}.ffn_norm",
        "model.layers.{layer}.post_attention_layernorm.weight",
        "H",
    ),
)
