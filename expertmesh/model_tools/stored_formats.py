"""In which formats a checkpoint has its weights, as `config.json` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from expertmesh.families import FAMILIES, Family
from expertmesh.formats import Quantization
from expertmesh.formats.storage import QuantizedStorage
from expertmesh.model_config import ModelConfig
from expertmesh.weight_storage import Weight


def stored_formats(config: ModelConfig, quantization: Quantization) -> dict[str, int]:
    """Format to the number of weights that have it, most first; plain ones by their dtype.

    Files name experts as on the hub, and all experts of a layer are taken to be stored alike.
    """
    storage = QuantizedStorage(quantization)
    numbers = Counter[str]()
    for weight, copies in _weights(config, FAMILIES[config.family]):
        codec = storage.codec_of(weight)
        numbers[config.dtype if codec is None else codec.name] += prod(weight.shape) * copies
    return dict(numbers.most_common())


def _weights(config: ModelConfig, family: Family) -> Iterator[tuple[Weight, int]]:
    """Weights, and how many there are like it."""
    for rule in family.attention_rules(config):
        for source in rule.sources:
            yield Weight(source.names[0], source.shape, rule.role), 1
    for layer in config.moe_layers:
        rules = family.expert_rules(config, layer)
        layout = rules.layouts[0]
        copies = 1 if layout.stacked else rules.num_experts
        for rule in rules.parameters(layout, 0):
            for source in rule.sources:
                yield Weight(source.names[0], source.shape, rule.parameter), copies
