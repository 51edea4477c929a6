"""A dense FFN as experts: what each tensor of the new model is made of.

plain       Every expert is the whole FFN (sparse upcycling, Komatsuzaki et al. 2022) and the gate
            is random. The gate weights add up to 1, so the text is the dense model's, whatever the
            gate chooses.
granular    The E experts form E/k groups; expert g + m * E/k is member m of group g. The members
            hold disjoint parts of the FFN's neurons, split by a permutation of their own per group
            and layer, with the down projection times k. Gate rows are equal within a group, so
            the k chosen experts are one group, tie at 1/k, and add up to the dense FFN. Text is
            right only if the right experts are chosen, computed and combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from expertmesh.errors import SettingsError
from expertmesh.families import FAMILIES
from expertmesh.host_tensor import Array, to_float32
from expertmesh.model_config import GateConfig, ModelConfig, MoeFfnConfig
from expertmesh.model_tools.dense_source import DenseSource
from expertmesh.model_tools.gate_skew import GateBias
from expertmesh.model_tools.numbers import from_float32, normal, permutation

GATE_STD = 0.05
MAX_EXPERTS = 1024
_PERMUTATION_STREAM, _GATE_STREAM = 1, 2


@dataclass(frozen=True)
class UpcycleSpec:
    """What to make of the dense FFNs."""

    num_experts: int
    top_k: int
    granular: bool
    seed: int = 0

    @property
    def num_groups(self) -> int:
        """Groups of experts with equal gate rows."""
        return self.num_experts // self.top_k if self.granular else self.num_experts

    def check(self, config: ModelConfig) -> None:
        """Raises SettingsError if the dense model cannot be split like this."""
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise SettingsError(f"experts: expected 1 to {MAX_EXPERTS}, got {self.num_experts}")
        if not 1 <= self.top_k <= self.num_experts:
            raise SettingsError(f"top-k: expected 1 to {self.num_experts}, got {self.top_k}")
        if not self.granular:
            return
        wide = config.layers[0].ffn.intermediate_size
        if self.num_experts % self.top_k or wide % self.top_k:
            raise SettingsError(
                f"top-k: expected a divisor of experts={self.num_experts} and of the intermediate "
                f"size {wide}, got {self.top_k}",
                fix="or leave out --granular",
            )
        if self.top_k & (self.top_k - 1):
            raise SettingsError(
                f"top-k: expected a power of two, got {self.top_k}",
                fix="only then is the split exact; or leave out --granular",
            )

    def config(self, dense: ModelConfig) -> ModelConfig:
        """The Mixtral model."""
        layer = dense.layers[0]
        wide = layer.ffn.intermediate_size // (self.top_k if self.granular else 1)
        ffn = MoeFfnConfig(GateConfig(self.num_experts, self.top_k), wide, layer.ffn.activation)
        layers = (replace(layer, ffn=ffn),) * dense.num_layers
        return replace(dense, family="mixtral", layers=layers)


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written; made only when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Array]


def dense_outputs(source: DenseSource) -> list[OutputTensor]:
    """The dense model as it is, in Llama format."""
    rules = FAMILIES["llama"].attention_rules(source.config)
    return [
        OutputTensor(stored.names[0], stored.shape, partial(source.tensor, stored.names[0]))
        for rule in rules
        for stored in rule.sources
    ]


def moe_outputs(source: DenseSource, spec: UpcycleSpec, bias: GateBias) -> list[OutputTensor]:
    """The tensors of the Mixtral model, layer by layer."""
    config = spec.config(source.config)
    splitter = _Splitter(source, spec, bias)
    outputs = []
    for rule in FAMILIES["mixtral"].attention_rules(config):
        gate_of = splitter.gates.get(rule.parameter)
        for stored in rule.sources:
            name = stored.names[0]
            make = partial(source.tensor, name)
            if gate_of is not None:
                make = partial(splitter.gate, gate_of)
            outputs.append(OutputTensor(name, stored.shape, make))
        if gate_of is not None:
            outputs += splitter.experts(config, gate_of)
    return outputs


class _Splitter:
    """Makes gates and experts of one model."""

    def __init__(self, source: DenseSource, spec: UpcycleSpec, bias: GateBias) -> None:
        self._config = source.config
        self._spec = spec
        self._bias = bias
        self.gates = {f"layers.{layer}.gate": layer for layer in range(self._config.num_layers)}
        # The three matrices of the layer at hand, since every expert is cut from them.
        self._tensor = lru_cache(maxsize=3)(source.tensor)

    def gate(self, layer: int) -> Array:
        """[E, H]"""
        spec, hidden = self._spec, self._config.hidden_size
        rows_GH = GATE_STD * normal((spec.num_groups, hidden), spec.seed, _GATE_STREAM, layer)
        rows_GH = self._bias.apply(layer, rows_GH)
        rows_EH = np.tile(rows_GH, (spec.num_experts // spec.num_groups, 1))
        return from_float32(rows_EH, self._config.dtype)

    def experts(self, config: ModelConfig, layer: int) -> Iterator[OutputTensor]:
        """w1, w3, w2 of each expert."""
        layout = FAMILIES["mixtral"].expert_layouts[0]
        gate, up = layout.gate_up
        hidden, wide = config.hidden_size, config.layers[layer].ffn.intermediate_size
        for expert in range(config.num_experts):
            for template, kind, shape in (
                (gate, "gate", (wide, hidden)),
                (up, "up", (wide, hidden)),
                (layout.down, "down", (hidden, wide)),
            ):
                name = template.format(layer=layer, expert=expert)
                yield OutputTensor(name, shape, partial(self._part, layer, expert, kind))

    def _part(self, layer: int, expert: int, kind: str) -> Array:
        whole: Array = self._tensor(f"model.layers.{layer}.mlp.{kind}_proj.weight")
        if not self._spec.granular:
            return whole
        neurons = self._neurons(layer, expert)
        if kind != "down":
            return whole[neurons]
        dtype = self._config.dtype
        columns = to_float32(whole[:, neurons], dtype)
        return from_float32(columns * np.float32(self._spec.top_k), dtype)

    def _neurons(self, layer: int, expert: int) -> npt.NDArray[np.int64]:
        """The neurons of an expert, ascending."""
        spec = self._spec
        member, group = divmod(expert, spec.num_groups)
        wide = self._config.layers[layer].ffn.intermediate_size
        order = permutation(wide, spec.seed, _PERMUTATION_STREAM, layer, group)
        return np.sort(order.reshape(spec.top_k, -1)[member])
