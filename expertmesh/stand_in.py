"""A small model of zeros that needs the same kernels as a large one.

Kernels are compiled for types: of weights, rows, codes, options. Types do not depend on sizes, so a
process that only compiles need not read, or hold, what it will never serve.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from expertmesh.checkpoint import Checkpoint, CodedExpert
from expertmesh.families import FAMILIES
from expertmesh.formats.coded import CodedMatrix
from expertmesh.formats.keep import Coding
from expertmesh.host_tensor import Array
from expertmesh.inventory import take_inventory
from expertmesh.model_config import DtypeName, LayerConfig, ModelConfig, MoeFfnConfig
from expertmesh.safetensors_file import STORAGE
from expertmesh.weight_storage import (
    OnBytes,
    Shape,
    StoredWeight,
    TensorFiles,
    Weight,
    unheard,
)

_WIDTH = 256
"""Of what is wider: hidden states, intermediate activations, the vocabulary."""
_ALIKE = 2
"""Layers of a kind: one kernel goes through several."""


class StandIn(Checkpoint):
    """Stands in for a checkpoint: same kinds of layers, types and codes, no files.

    Args:
        original: What it stands in for.
    """

    def __init__(self, original: Checkpoint) -> None:
        config, originals = _smaller(original.config)
        inventory = take_inventory(config, FAMILIES[config.family], _Zeros(config.dtype), {})
        super().__init__(original.model_dir, config, {}, inventory, original.quantization)
        self._original = original
        self._codings = tuple(map(original.expert_coding, originals))

    def expert_formats(self) -> tuple[str, ...]:
        """As in the original."""
        return self._original.expert_formats()

    def expert_coding(self, layer: int) -> Coding | None:
        """As in the original."""
        return self._codings[layer]

    def read_coded_expert(
        self, layer: int, expert: int, on_bytes: OnBytes = unheard
    ) -> CodedExpert:
        """Codes of zeros, as the original codes its experts."""
        coding, tensors = self.expert_coding(layer), self.read_expert(layer, expert, on_bytes)
        assert coding is not None, f"layer {layer} has plain experts"
        return CodedExpert(
            _zero_codes(coding, tensors.gate_up.shape),
            _zero_codes(coding, tensors.down.shape),
            tensors.gate_up_bias,
            tensors.down_bias,
        )


def _smaller(config: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """The model with few layers, and for each of these its number in the original."""
    layers: list[LayerConfig] = []
    originals: list[int] = []
    seen: Counter[LayerConfig] = Counter()
    for index, layer in enumerate(map(_narrower, config.layers)):
        seen[layer] += 1
        if seen[layer] <= _ALIKE:
            layers.append(layer)
            originals.append(index)
    small = replace(
        config,
        layers=tuple(layers),
        hidden_size=min(_WIDTH, config.hidden_size),
        vocab_size=min(_WIDTH, config.vocab_size),
    )
    return small, tuple(originals)


def _narrower(layer: LayerConfig) -> LayerConfig:
    ffn = replace(layer.ffn, intermediate_size=min(_WIDTH, layer.ffn.intermediate_size))
    if isinstance(ffn, MoeFfnConfig) and ffn.shared is not None:
        wide = min(_WIDTH, ffn.shared.intermediate_size)
        ffn = replace(ffn, shared=replace(ffn.shared, intermediate_size=wide))
    return replace(layer, ffn=ffn)


@dataclass(frozen=True)
class _Zeros:
    """Has every weight. A `WeightStorage`."""

    dtype: DtypeName

    def holds(self, weight: Weight, files: TensorFiles) -> bool:
        """Yes."""
        return True

    def take(self, weight: Weight, files: TensorFiles) -> StoredWeight:
        """Zeros of its shape."""
        return _ZeroWeight(weight.name, weight.shape, self.dtype)


@dataclass(frozen=True)
class _ZeroWeight:
    """A weight of zeros. A `StoredWeight`."""

    name: str
    shape: Shape
    dtype: DtypeName

    @property
    def path(self) -> Path:
        """There is none."""
        return Path()

    def nbytes(self, index: int | None = None) -> int:
        """Bytes as if it were stored."""
        shape = self.shape if index is None else self.shape[1:]
        return int(np.prod(shape)) * STORAGE[self.dtype].itemsize

    def read(
        self, index: int | None = None, out: Array | None = None, on_bytes: OnBytes = unheard
    ) -> Array:
        """Zeros."""
        shape = self.shape if index is None else self.shape[1:]
        found = np.empty(shape, STORAGE[self.dtype]) if out is None else out
        found[...] = 0
        on_bytes(found.reshape(-1).view(np.uint8))
        return found


def _zero_codes(coding: Coding, shape: Shape) -> CodedMatrix:
    rows, columns = shape
    num_groups = -(-columns // coding.group) if coding.group else 1
    codes = np.zeros((rows, columns), np.uint8)
    return CodedMatrix(coding.kind, codes, np.ones((rows, num_groups), np.float32), coding.group)
