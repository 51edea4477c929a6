"""Matches the tensors of a checkpoint with the rules of its family: each used once, none missing.

The result is a table of byte ranges; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from expertmesh.errors import CheckpointError
from expertmesh.families import ExpertLayout, ExpertRules, Family, StoredTensor
from expertmesh.model_config import ModelConfig
from expertmesh.safetensors_file import DTYPE_NAMES, Extent, SafetensorsFile

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as byte ranges to be read one after the other."""

    extents: tuple[Extent, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertSource:
    """One expert as byte ranges."""

    gate_up: ParameterSource
    """[2I, H]"""
    down: ParameterSource
    """[H, I]"""


@dataclass(frozen=True)
class Inventory:
    """Where everything lies."""

    parameters: dict[str, ParameterSource] = field(default_factory=dict)
    experts: dict[tuple[int, int], ExpertSource] = field(default_factory=dict)
    """(layer, expert) to byte ranges."""
    tied_copy: ParameterSource | None = None
    """An lm_head that is stored although it is tied: has to equal the embedding."""


def take_inventory(
    config: ModelConfig, family: Family, files: Mapping[str, SafetensorsFile]
) -> Inventory:
    """Byte ranges of all parameters and experts.

    Raises:
        CheckpointError: a tensor is missing, not used, or has another shape or type than expected.
    """
    picker = _Picker(config, family, dict(files))
    parameters = {
        rule.parameter: picker.stacked(rule.sources) for rule in family.attention_rules(config)
    }
    experts: dict[tuple[int, int], ExpertSource] = {}
    for layer in config.moe_layers:
        picker.add_experts(family.expert_rules(config, layer), experts)
    tied_copy = None
    if config.tie_word_embeddings and LM_HEAD in picker.unused:
        shape = (config.vocab_size, config.hidden_size)
        tied_copy = picker.stacked((StoredTensor((LM_HEAD,), shape),))
    picker.check_all_used()
    return Inventory(parameters, experts, tied_copy)


@dataclass
class _Picker:
    """Hands out tensors by name and remembers which were used."""

    config: ModelConfig
    family: Family
    unused: dict[str, SafetensorsFile]
    used: dict[str, SafetensorsFile] = field(default_factory=dict)

    def stacked(self, sources: tuple[StoredTensor, ...]) -> ParameterSource:
        extents = tuple(self._whole(source) for source in sources)
        first = sources[0].shape
        rows = sum(source.shape[0] for source in sources)
        return ParameterSource(extents, (rows, *first[1:]))

    def add_experts(self, rules: ExpertRules, experts: dict[tuple[int, int], ExpertSource]) -> None:
        layout = self._layout(rules)
        hidden, wide = rules.hidden_size, rules.intermediate_size
        part = (2 * wide // len(layout.gate_up), hidden)
        for expert in range(rules.num_experts):
            gate_up = tuple(self._expert(n, rules, expert, part) for n in layout.gate_up)
            down = self._expert(layout.down, rules, expert, (hidden, wide))
            experts[rules.layer, expert] = ExpertSource(
                ParameterSource(gate_up, (2 * wide, hidden)),
                ParameterSource((down,), (hidden, wide)),
            )

    def check_all_used(self) -> None:
        extra = [name for name in self.unused if not self.family.ignores(name)]
        if not extra:
            return
        name = min(extra)
        raise CheckpointError(
            f"{self.unused[name].path}: tensor {name}: not a tensor of the family "
            f"{self.family.model_type} with this config"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
            fix="check that config.json belongs to these files",
        )

    def _layout(self, rules: ExpertRules) -> ExpertLayout:
        for layout in rules.layouts:
            if layout.sample(rules.layer) in self.unused:
                return layout
        raise self._missing(tuple(layout.sample(rules.layer) for layout in rules.layouts))

    def _expert(
        self, template: str, rules: ExpertRules, expert: int, shape: tuple[int, ...]
    ) -> Extent:
        name = template.format(layer=rules.layer, expert=expert)
        if "{expert}" in template:
            return self._whole(StoredTensor((name,), shape))
        if expert == 0:
            self._whole(StoredTensor((name,), (rules.num_experts, *shape)))
        return self.used[name].extent(name, expert)

    def _whole(self, tensor: StoredTensor) -> Extent:
        present = [name for name in tensor.names if name in self.unused]
        if not present:
            raise self._missing(tensor.names)
        name = present[0]
        file = self.unused.pop(name)
        self.used[name] = file
        header = file.tensors[name]
        if header.shape != tensor.shape:
            raise CheckpointError(
                f"{file.path}: tensor {name}: expected shape {list(tensor.shape)}, "
                f"found {list(header.shape)}",
                fix="check that config.json belongs to these files",
            )
        if DTYPE_NAMES.get(header.dtype_code) != self.config.dtype:
            found = DTYPE_NAMES.get(header.dtype_code, header.dtype_code)
            raise CheckpointError(
                f"{file.path}: tensor {name}: expected dtype {self.config.dtype} as config.json "
                f"says, found {found}",
                fix="set `dtype` in config.json to what is stored, or convert the files",
            )
        return file.extent(name)

    def _missing(self, names: tuple[str, ...]) -> CheckpointError:
        folder = next(iter((self.used | self.unused).values())).path.parent
        fix = "check that the download is complete and that config.json belongs to these files"
        if LM_HEAD in names:
            fix = 'set "tie_word_embeddings": true in config.json if the embedding is shared'
        return CheckpointError(
            f"{folder}: tensor {' or '.join(names)}: expected once, found nowhere", fix=fix
        )
