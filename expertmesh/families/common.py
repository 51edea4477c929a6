"""What the configs of families have in common: the usual keys, with bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from expertmesh.families.config_reader import ConfigReader
from expertmesh.families.rope import MAX_POSITIONS, parse_rope
from expertmesh.model_config import (
    GELU_TANH,
    SILU,
    Activation,
    DenseFfnConfig,
    DtypeName,
    GateConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)

# Bounds: well above every public model, low enough that no product of them overflows 64 bits.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 24
MAX_EXPERTS = 1 << 14

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
"""The last is an old name of the first."""

BASE_DEFAULTS: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Defaults that most families share."""


def parse_model(
    reader: ConfigReader,
    layers: Sequence[LayerConfig],
    *,
    norm: NormConfig | None = None,
    embedding_scale: float = 1.0,
    logits_softcap: float | None = None,
) -> ModelConfig:
    """A model of these layers."""
    vocab_size = reader.integer("vocab_size", 1, MAX_VOCAB)
    return ModelConfig(
        family=reader.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size(reader),
        layers=tuple(layers),
        norm=NormConfig(norm_eps(reader)) if norm is None else norm,
        max_position_embeddings=reader.integer("max_position_embeddings", 1, MAX_POSITIONS),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        dtype=_dtype(reader),
        bos_token_id=reader.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=reader.integers("eos_token_id", 0, vocab_size - 1),
        embedding_scale=embedding_scale,
        logits_softcap=logits_softcap,
    )


def parse_attention(
    reader: ConfigReader, rope_of: Callable[[ConfigReader, int], RopeConfig] = parse_rope
) -> GqaConfig:
    """Grouped-query attention with nothing special.

    Args:
        reader: The config.
        rope_of: Makes the rope for a head size; by default it is over the whole head.
    """
    num_heads, num_kv_heads = parse_heads(reader, "num_attention_heads", "num_key_value_heads")
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
        rope=rope_of(reader, head_dim),
        scale=head_dim**-0.5,
    )


def parse_heads(reader: ConfigReader, heads: str, kv_heads: str) -> tuple[int, int]:
    """Query heads and key heads; the latter divide the former."""
    num_heads = reader.integer(heads, 1, MAX_HEADS)
    num_kv_heads = reader.integer(kv_heads, 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        reader.fail(kv_heads, f"a divisor of {heads}={num_heads}")
    return num_heads, num_kv_heads


def parse_dense_ffn(reader: ConfigReader, *, bias: bool = False) -> DenseFfnConfig:
    """The FFN of dense layers."""
    return DenseFfnConfig(intermediate_size(reader), parse_activation(reader), bias)


def parse_softmax_gate(reader: ConfigReader, experts_key: str, *, renormalize: bool) -> GateConfig:
    """A gate whose scores are a softmax over all experts."""
    num_experts = reader.integer(experts_key, 1, MAX_EXPERTS)
    return GateConfig(num_experts, top_k(reader, num_experts), renormalize=renormalize)


def top_k(reader: ConfigReader, num_experts: int) -> int:
    """Experts per token."""
    return reader.integer("num_experts_per_tok", 1, num_experts)


def sparse_layers(reader: ConfigReader) -> list[bool]:
    """Which layers have experts: each `decoder_sparse_step`-th but for `mlp_only_layers`."""
    layers = num_layers(reader)
    step = reader.integer("decoder_sparse_step", 1, MAX_LAYERS)
    dense = reader.integers("mlp_only_layers", 0, MAX_LAYERS)
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def sliding_layers(reader: ConfigReader, default: Callable[[int], bool]) -> list[bool]:
    """Which layers have a sliding window: `layer_types`, or the family's rule by index."""
    layers = num_layers(reader)
    types = reader.choices("layer_types", layers, LAYER_TYPES)
    if types is None:
        return [default(i) for i in range(layers)]
    return [kind == "sliding_attention" for kind in types]


def windows(reader: ConfigReader, sliding: Iterable[bool]) -> list[int | None]:
    """Window of each layer, None for full attention."""
    return [sliding_window(reader) if flag else None for flag in sliding]


def sliding_window(reader: ConfigReader) -> int:
    """Keys that a query of a layer with a window sees, itself included."""
    return reader.integer("sliding_window", 1, MAX_POSITIONS)


def optional_window(reader: ConfigReader) -> int | None:
    """The window of all layers, or None."""
    return reader.optional_integer("sliding_window", 1, MAX_POSITIONS)


def spelling(reader: ConfigReader, *keys: str) -> str:
    """The one of several names of a key that the file uses; the first if it uses none."""
    given = [key for key in keys if key in reader.raw]
    for key in given[1:]:
        if reader.raw[key] != reader.raw[given[0]]:
            reader.fail(key, f"the same as {given[0]}={reader.raw[given[0]]!r:.40}")
    return given[0] if given else keys[0]


def num_layers(reader: ConfigReader) -> int:
    """Decoder layers."""
    return reader.integer("num_hidden_layers", 1, MAX_LAYERS)


def hidden_size(reader: ConfigReader) -> int:
    """Width of the residual stream."""
    return reader.integer("hidden_size", 1, MAX_WIDTH)


def intermediate_size(reader: ConfigReader, key: str = "intermediate_size") -> int:
    """Width of an FFN."""
    return reader.integer(key, 1, MAX_WIDTH)


def norm_eps(reader: ConfigReader, key: str = "rms_norm_eps") -> float:
    """What is added to the mean square."""
    return reader.number(key, 0.0, 1.0)


def parse_activation(reader: ConfigReader, key: str = "hidden_act") -> Activation:
    """The activation of FFNs."""
    return ACTIVATIONS[reader.choice(key, tuple(ACTIVATIONS))]


def _dtype(reader: ConfigReader) -> DtypeName:
    """What the file says in either spelling, else the default."""
    key = "torch_dtype" if reader.get("dtype") is None else "dtype"
    default = reader.defaults.get("torch_dtype", "float32")
    name = reader.text(key, str(default)).removeprefix("torch.")
    if name not in DTYPES:
        reader.fail(key, f"one of {', '.join(DTYPES)}")
    return cast(DtypeName, name)
