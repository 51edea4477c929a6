"""How many weights each part of a model has, as its family names them: no file is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from expertmesh.families import FAMILIES, Family, ParameterRule
from expertmesh.model_config import LayerConfig, ModelConfig, MoeFfnConfig

_EXACT = frozenset({"gate", "gate_bias", "selection_bias", "shared_gate", "sinks"})
"""Parameters that are computed with in FP32, beside the norms."""


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

    resident: Weights
    """What the attention worker holds: all but the routed experts."""
    expert: Weights = NONE
    """One routed expert."""
    num_experts: int = 0
    top_k: int = 0

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
    family = FAMILIES[config.family]
    whole = {rule.parameter: _count(rule) for rule in family.model_rules(config)}
    by_kind: dict[LayerConfig, LayerSize] = {}
    for index, layer in enumerate(config.layers):
        if layer not in by_kind:
            by_kind[layer] = _layer_size(family, config, index)
    return ModelSize(
        embedding=whole["embed"],
        head=whole.get("lm_head", NONE),
        norm=whole["norm"],
        layers=tuple(by_kind[layer] for layer in config.layers),
    )


def _layer_size(family: Family, config: ModelConfig, index: int) -> LayerSize:
    resident = _sum(map(_count, family.layer_rules(config, index)))
    ffn = config.layers[index].ffn
    if not isinstance(ffn, MoeFfnConfig):
        return LayerSize(resident)
    experts = family.expert_rules(config, index)
    expert = _sum(map(_count, experts.parameters(experts.layouts[0], 0)))
    return LayerSize(resident, expert, ffn.num_experts, ffn.gate.top_k)


def _count(rule: ParameterRule) -> Weights:
    count = prod(rule.shape)
    is_exact = rule.role in _EXACT or rule.role.endswith("norm")
    return Weights(exact=count) if is_exact else Weights(count)


def _sum(parts: Iterable[Weights]) -> Weights:
    return sum(parts, NONE)
