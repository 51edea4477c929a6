"""Matches the tensors of a checkpoint with the rules of its family: each used once, none missing.

The result says where everything lies; no data is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from expertmesh.errors import CheckpointError
from expertmesh.families import ExpertLayout, ExpertRules, Family, ParameterRule
from expertmesh.model_config import ModelConfig
from expertmesh.parameter_source import Arrangement, ParameterSource
from expertmesh.safetensors_file import SafetensorsFile
from expertmesh.weight_storage import (
    Shape,
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
    def num_elements(self) -> int:
        """Elements of the weights."""
        return sum(part.num_elements for part in self._parts)

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
        tied_copy = picker.optional(Weight(LM_HEAD, _embedding_shape(config), "lm_head"))
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


def _embedding_shape(config: ModelConfig) -> Shape:
    return (config.vocab_size, config.hidden_size)


@dataclass(frozen=True)
class _Picker:
    """Hands out weights by name."""

    storage: WeightStorage
    files: TensorFiles

    def joined(self, rule: ParameterRule) -> ParameterSource:
        """Weights one below the other."""
        role = re.sub(r"^layers\.\d+\.", "", rule.parameter)
        weights = tuple(self.take(s.names, s.shape, role) for s in rule.sources)
        rows = sum(source.shape[0] for source in rule.sources)
        return ParameterSource(weights, (rows, *rule.sources[0].shape[1:]))

    def optional(self, weight: Weight) -> ParameterSource | None:
        """A weight that may be missing."""
        if not self.storage.holds(weight, self.files):
            return None
        return ParameterSource((self.storage.take(weight, self.files),), weight.shape)

    def take(self, names: tuple[str, ...], shape: Shape, role: str) -> StoredWeight:
        """The weight that has one of these names."""
        for name in names:
            weight = Weight(name, shape, role)
            if self.storage.holds(weight, self.files):
                return self.storage.take(weight, self.files)
        fix = ""
        if LM_HEAD in names:
            fix = 'set "tie_word_embeddings": true in config.json if the embedding is shared'
        raise missing(self.files.folder, names, fix)

    def experts(self, rules: ExpertRules) -> dict[tuple[int, int], ExpertSource]:
        """All experts of a layer, in the first layout of which there is any weight."""
        layouts = [_ExpertPicker(self, rules, layout, {}) for layout in rules.layouts]
        picker = next((layout for layout in layouts if layout.is_used()), None)
        if picker is None:
            names = tuple(layout.sample() for layout in layouts)
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
        """Whether the files hold any matrix of the first expert."""
        picker = self.picker
        matrices = (*self._gate_up(0), self._down(0))
        return any(picker.storage.holds(weight, picker.files) for weight in matrices)

    def sample(self) -> str:
        """A tensor that files in this layout have."""
        return self._gate_up(0)[0].name

    def expert(self, expert: int) -> ExpertSource:
        """Where an expert is read from."""
        layout, rules = self.layout, self.rules
        rows = 2 * rules.intermediate_size
        interleaved = Arrangement(layout.transposed, layout.interleaved)
        source = ExpertSource(
            self._source(self._gate_up(expert), expert, (rows, rules.hidden_size), interleaved),
            self._source(
                (self._down(expert),),
                expert,
                (rules.hidden_size, rules.intermediate_size),
                Arrangement(layout.transposed),
            ),
        )
        return replace(source, **self._biases(expert)) if rules.bias else source

    def _biases(self, expert: int) -> dict[str, ParameterSource]:
        layout, rows, hidden = self.layout, 2 * self.rules.intermediate_size, self.rules.hidden_size
        gate_up = self._weight("gate_up_bias", layout.gate_up_bias, expert, (rows,))
        down = self._weight("down_bias", layout.down_bias, expert, (hidden,))
        interleaved = Arrangement(interleaved=layout.interleaved)
        return {
            "gate_up_bias": self._source((gate_up,), expert, (rows,), interleaved),
            "down_bias": self._source((down,), expert, (hidden,), Arrangement()),
        }

    def _gate_up(self, expert: int) -> tuple[Weight, ...]:
        names = self.layout.gate_up
        shape = (2 * self.rules.intermediate_size // len(names), self.rules.hidden_size)
        return tuple(self._matrix("gate_up", name, expert, shape) for name in names)

    def _down(self, expert: int) -> Weight:
        shape = (self.rules.hidden_size, self.rules.intermediate_size)
        return self._matrix("down", self.layout.down, expert, shape)

    def _matrix(self, role: str, template: str, expert: int, shape: Shape) -> Weight:
        stored = shape[::-1] if self.layout.transposed else shape
        return self._weight(role, template, expert, stored)

    def _weight(self, role: str, template: str, expert: int, shape: Shape) -> Weight:
        name = template.format(layer=self.rules.layer, expert=expert)
        stacked = "{expert}" not in template
        stored = (self.rules.num_experts, *shape) if stacked else shape
        return Weight(name, stored, f"experts.{role}")

    def _source(
        self, weights: tuple[Weight, ...], expert: int, shape: Shape, arrangement: Arrangement
    ) -> ParameterSource:
        stacked = len(weights[0].shape) > len(shape)
        taken = tuple(self._take(weight, stacked) for weight in weights)
        return ParameterSource(taken, shape, expert if stacked else None, arrangement)

    def _take(self, weight: Weight, stacked: bool) -> StoredWeight:
        if weight.name in self.stacks:
            return self.stacks[weight.name]
        taken = self.picker.take((weight.name,), weight.shape, weight.parameter)
        if stacked:
            self.stacks[weight.name] = taken
        return taken
