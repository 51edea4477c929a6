"""How many weights each part of a model has: pure arithmetic over its description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from expertmesh.model_config import (
    DenseFfnConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
)


@dataclass(frozen=True)
class Weights:
    """A number of weights, by the type in which they are computed with."""

    plain: int = 0
    """In the dtype that is served."""
    exact: int = 0
    """Always FP32: norms, gates, selection biases, sinks."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.plain + other.plain, self.exact + other.exact)

    def __mul__(self, factor: int) -> Weights:
        return Weights(self.plain * factor, self.exact * factor)

    @property
    def count(self) -> int:
        """All of them."""
        return self.plain + self.exact

    def nbytes(self, itemsize: int) -> int:
        """Memory, if an element of the served dtype takes `itemsize` bytes."""
        return self.plain * itemsize + self.exact * 4


NONE = Weights()


@dataclass(frozen=True)
class LayerSize:
    """Weights of a layer."""

    attention: Weights
    """With the norms of the layer."""
    ffn: Weights
    """What the attention worker has of the FFN: a dense one whole; gate and shared expert."""
    expert: Weights = NONE
    """One routed expert."""
    num_experts: int = 0
    top_k: int = 0

    @property
    def resident(self) -> Weights:
        """What the attention worker holds."""
        return self.attention + self.ffn

    @property
    def experts(self) -> Weights:
        """All routed experts."""
        return self.expert * self.num_experts

    @property
    def chosen(self) -> Weights:
        """The routed experts of one token."""
        return self.expert * self.top_k


@dataclass(frozen=True)
class ModelSize:
    """Weights of a model."""

    embedding: Weights
    head: Weights
    """Of the output projection: none of its own where it is the embedding."""
    norm: Weights
    layers: tuple[LayerSize, ...]

    @property
    def attention_worker(self) -> Weights:
        """Everything but the routed experts."""
        layers = _sum(layer.resident for layer in self.layers)
        return self.embedding + self.head + self.norm + layers

    @property
    def experts(self) -> Weights:
        """All routed experts of all layers."""
        return _sum(layer.experts for layer in self.layers)

    @property
    def chosen_experts(self) -> Weights:
        """The routed experts of one token in all layers."""
        return _sum(layer.chosen for layer in self.layers)

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return (self.attention_worker + self.experts).count

    @property
    def active(self) -> int:
        """Parameters that take part in a token: all but the experts that are not chosen."""
        return (self.attention_worker + self.chosen_experts).count


def model_size(config: ModelConfig) -> ModelSize:
    """Counts the weights of a model."""
    table = Weights(config.vocab_size * config.hidden_size)
    by_kind = {layer: _layer_size(config, layer) for layer in set(config.layers)}
    return ModelSize(
        embedding=table,
        head=NONE if config.tie_word_embeddings else table,
        norm=Weights(exact=config.hidden_size),
        layers=tuple(by_kind[layer] for layer in config.layers),
    )


def _layer_size(config: ModelConfig, layer: LayerConfig) -> LayerSize:
    width = config.hidden_size
    norms = Weights(exact=width * (4 if layer.out_norms else 2))
    match layer.attention:
        case GqaConfig() as gqa:
            attention = norms + _gqa(gqa, width)
        case MlaConfig() as mla:
            attention = norms + _mla(mla, width)
    match layer.ffn:
        case DenseFfnConfig() as ffn:
            return LayerSize(attention, _gated_ffn(width, ffn.intermediate_size, bias=ffn.bias))
        case MoeFfnConfig() as moe:
            expert = _gated_ffn(width, moe.intermediate_size, bias=moe.bias)
            resident = _gate(moe, width) + _shared(moe, width)
            return LayerSize(attention, resident, expert, moe.num_experts, moe.gate.top_k)


def _gqa(attention: GqaConfig, width: int) -> Weights:
    projected = attention.q_size + attention.k_size + attention.v_size
    plain = width * (projected + attention.out_size)
    plain += attention.qkv_bias * projected + attention.o_bias * width
    match attention.qk_norm:
        case "none":
            norms = 0
        case "head":
            norms = 2 * attention.head_dim
        case "whole":
            norms = attention.q_size + attention.k_size
    return Weights(plain, norms + attention.sinks * attention.num_heads)


def _mla(attention: MlaConfig, width: int) -> Weights:
    rank, latent = attention.q_lora_rank, attention.kv_lora_rank
    entry = latent + attention.rope_head_dim
    plain = width * (entry + attention.out_size) + latent * attention.kv_b_size
    biases = entry + width
    if rank is None:
        query, norms = width * attention.q_size, latent
    else:
        query, norms = rank * (width + attention.q_size), latent + rank
        biases += rank
    return Weights(plain + query + attention.bias * biases, norms)


def _gated_ffn(width: int, intermediate: int, *, bias: bool) -> Weights:
    return Weights(3 * width * intermediate + bias * (2 * intermediate + width))


def _gate(moe: MoeFfnConfig, width: int) -> Weights:
    gate = moe.gate
    return Weights(exact=gate.num_experts * (width + gate.bias + gate.selection_bias))


def _shared(moe: MoeFfnConfig, width: int) -> Weights:
    if moe.shared is None:
        return NONE
    gate = Weights(exact=width * moe.shared.gated)
    return gate + _gated_ffn(width, moe.shared.intermediate_size, bias=False)


def _sum(parts: Iterable[Weights]) -> Weights:
    return sum(parts, NONE)
