"""Matches the tensors of a checkpoint with the rules of its family: each used once, none missing.

The result says where everything lies; no data is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from expertmesh.errors import CheckpointError
from expertmesh.families import ExpertLayout, ExpertRules, Family, ParameterRule, WeightRule
from expertmesh.model_config import ModelConfig
from expertmesh.parameter_source import Arrangement, ParameterSource
from expertmesh.safetensors_file import SafetensorsFile
from expertmesh.weight_storage import (
    StoredWeight,
    TensorFiles,
    Weight,
    WeightStorage,
    missing,
)

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ExpertSource:
    """Where one expert is read from."""

    gate_up: ParameterSource
    """[2I, H]"""
    down: ParameterSource
    """[H, I]"""
    gate_up_bias: ParameterSource | None = None
    """[2I]"""
    down_bias: ParameterSource | None = None
    """[H]"""

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> list[ParameterSource]:
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return [part for part in parts if part is not None]


@dataclass(frozen=True)
class Inventory:
    """Where everything lies."""

    parameters: dict[str, ParameterSource] = field(default_factory=dict)
    experts: dict[tuple[int, int], ExpertSource] = field(default_factory=dict)
    """(layer, expert) to its place."""
    tied_copy: ParameterSource | None = None
    """An lm_head that is stored although it is tied: has to equal the embedding."""


def take_inventory(
    config: ModelConfig,
    family: Family,
    storage: WeightStorage,
    files: Mapping[str, SafetensorsFile],
) -> Inventory:
    """Places of all parameters and experts.

    Raises:
        CheckpointError: a tensor is missing, not used, or has another shape or type than expected.
    """
    picker = _Picker(storage, TensorFiles(files))
    parameters = {rule.parameter: picker.joined(rule) for rule in family.attention_rules(config)}
    experts: dict[tuple[int, int], ExpertSource] = {}
    for layer in config.moe_layers:
        experts |= picker.experts(family.expert_rules(config, layer))
    tied_copy = None
    if config.tie_word_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        tied_copy = picker.optional(Weight(LM_HEAD, shape, "lm_head"))
    _check_all_used(config, family, picker.files, files)
    return Inventory(parameters, experts, tied_copy)


def _check_all_used(
    config: ModelConfig,
    family: Family,
    left: TensorFiles,
    files: Mapping[str, SafetensorsFile],
) -> None:
    extra = [name for name in left.left() if not family.ignores(name, config, files)]
    if not extra:
        return
    name = min(extra)
    raise CheckpointError(
        f"{files[name].path}: tensor {name}: not a tensor of the family "
        f"{family.model_type} with this config"
        + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
        fix="check that config.json belongs to these files",
    )


@dataclass(frozen=True)
class _Picker:
    """Hands out weights by name."""

    storage: WeightStorage
    files: TensorFiles

    def joined(self, rule: ParameterRule) -> ParameterSource:
        """Weights one below the other."""
        weights = tuple(self.take(source, rule.role) for source in rule.sources)
        return ParameterSource(weights, rule.shape)

    def optional(self, weight: Weight) -> ParameterSource | None:
        """A weight that may be missing."""
        if not self.storage.holds(weight, self.files):
            return None
        return ParameterSource((self.storage.take(weight, self.files),), weight.shape)

    def take(self, rule: WeightRule, role: str) -> StoredWeight:
        """The weight, under one of its names."""
        for name in rule.names:
            weight = Weight(name, rule.shape, role)
            if self.storage.holds(weight, self.files):
                return self.storage.take(weight, self.files)
        fix = ""
        if LM_HEAD in rule.names:
            fix = 'set "tie_word_embeddings": true in config.json if the embedding is shared'
        raise missing(self.files.folder, rule.names, fix)

    def experts(self, rules: ExpertRules) -> dict[tuple[int, int], ExpertSource]:
        """All experts of a layer, in the first layout of which there is any weight."""
        pickers = [_ExpertPicker(self, rules, layout, {}) for layout in rules.layouts]
        picker = next((picker for picker in pickers if picker.is_used()), None)
        if picker is None:
            names = tuple(picker.weights(0)[0].name for picker in pickers)
            raise missing(self.files.folder, names)
        return {(rules.layer, expert): picker.expert(expert) for expert in range(rules.num_experts)}


@dataclass(frozen=True)
class _ExpertPicker:
    """Hands out the experts of a layer in one layout; stacked weights are taken once."""

    picker: _Picker
    rules: ExpertRules
    layout: ExpertLayout
    stacks: dict[str, StoredWeight]

    def is_used(self) -> bool:
        """Whether the files hold any weight of the first expert."""
        picker = self.picker
        return any(picker.storage.holds(weight, picker.files) for weight in self.weights(0))

    def weights(self, expert: int) -> list[Weight]:
        """All weights of an expert."""
        return [
            Weight(source.names[0], source.shape, rule.parameter)
            for rule in self.rules.parameters(self.layout, expert)
            for source in rule.sources
        ]

    def expert(self, expert: int) -> ExpertSource:
        """Where an expert is read from."""
        sources = {
            rule.parameter.removeprefix("experts."): self._source(rule, expert)
            for rule in self.rules.parameters(self.layout, expert)
        }
        return ExpertSource(**sources)

    def _source(self, rule: ParameterRule, expert: int) -> ParameterSource:
        layout = self.layout
        weights = tuple(self._take(source, rule.parameter) for source in rule.sources)
        arrangement = Arrangement(
            transposed=layout.transposed and len(rule.shape) == 2,
            interleaved=layout.interleaved and "gate_up" in rule.parameter,
        )
        index = expert if layout.stacked else None
        return ParameterSource(weights, rule.shape, index, arrangement)

    def _take(self, rule: WeightRule, role: str) -> StoredWeight:
        (name,) = rule.names
        if name in self.stacks:
            return self.stacks[name]
        taken = self.picker.take(rule, role)
        if self.layout.stacked:
            self.stacks[name] = taken
        return taken
