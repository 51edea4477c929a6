"""What Qwen2, Qwen3 and their MoE models have in common."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families import common
from expertmesh.families.config_reader import ConfigReader
from expertmesh.model_config import GqaConfig, LayerConfig, ModelConfig, MoeFfnConfig

_WINDOW_DEFAULTS: dict[str, object] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
}

DENSE_DEFAULTS: dict[str, object] = {
    **common.BASE_DEFAULTS,
    **_WINDOW_DEFAULTS,
    "max_window_layers": 28,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

MOE_DEFAULTS: dict[str, object] = {
    **common.BASE_DEFAULTS,
    **_WINDOW_DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}


def _upper_windows(reader: ConfigReader) -> list[int | None]:
    """Window of each layer: `layer_types`, or windows from `max_window_layers` on."""
    first = reader.integer("max_window_layers", 0, common.MAX_LAYERS)
    enabled = _windows_enabled(reader)
    return _windows(reader, common.sliding_layers(reader, lambda i: enabled and i >= first))


def alternate_windows(reader: ConfigReader) -> list[int | None]:
    """Window of each layer: `layer_types`, or every other one below `max_window_layers`."""
    end = reader.integer("max_window_layers", 0, common.MAX_LAYERS)
    enabled = _windows_enabled(reader)
    return _windows(
        reader, common.sliding_layers(reader, lambda i: enabled and i % 2 == 0 and i < end)
    )


def same_window(reader: ConfigReader) -> int | None:
    """The window of all layers."""
    return common.sliding_window(reader) if _windows_enabled(reader) else None


def _windows_enabled(reader: ConfigReader) -> bool:
    return reader.boolean("use_sliding_window") and reader.get("sliding_window") is not None


def _windows(reader: ConfigReader, sliding: list[bool]) -> list[int | None]:
    if any(sliding) and not reader.boolean("use_sliding_window"):
        reader.fail("use_sliding_window", "true, as layer_types has sliding_attention")
    return common.windows(reader, sliding)


def moe_ffn(reader: ConfigReader, experts_key: str) -> MoeFfnConfig:
    """The FFN of layers with experts."""
    renormalize = reader.boolean("norm_topk_prob")
    gate = common.parse_softmax_gate(reader, experts_key, renormalize=renormalize)
    wide = common.intermediate_size(reader, "moe_intermediate_size")
    return MoeFfnConfig(gate, wide, common.parse_activation(reader))


def parse_dense_model(reader: ConfigReader, attention: GqaConfig) -> ModelConfig:
    """A dense model whose upper layers may have a window."""
    ffn = common.parse_dense_ffn(reader)
    layers = [
        LayerConfig(replace(attention, sliding_window=window), ffn)
        for window in _upper_windows(reader)
    ]
    return common.parse_model(reader, layers)


def parse_moe_model(
    reader: ConfigReader, attention: GqaConfig, moe: MoeFfnConfig, windows: list[int | None]
) -> ModelConfig:
    """A model some of whose layers may be dense, as `decoder_sparse_step` says."""
    dense = common.parse_dense_ffn(reader)
    layers = [
        LayerConfig(replace(attention, sliding_window=window), moe if sparse else dense)
        for window, sparse in zip(windows, common.sparse_layers(reader), strict=True)
    ]
    return common.parse_model(reader, layers)
