"""Decoder layers as one kernel on CPU, with all experts in this process.

T rows, L layers, K top-k, S sequences, B blocks, G KV groups. Bits are those of
`attention_half_`, `choose_experts`, `combined_mlp` and `add_rms_norm`, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.activation import cpu_arguments
from expertmesh_kernels.attention_half import AttentionHalf, RmsWeights
from expertmesh_kernels.cpu.layers import Moe, MoeNumbers
from expertmesh_kernels.cpu.layers import local_layers as cpu_local_layers
from expertmesh_kernels.grouped_mlp import ExpertTable
from expertmesh_kernels.host import LIKE, address, as_array
from expertmesh_kernels.paged_attention import KvCache
from expertmesh_kernels.router import Gate


@dataclass(frozen=True)
class LocalMoe:
    """The second half of a layer, whose experts are all here.

    Raises:
        ValueError: An expert is not in the table.
    """

    gate: Gate
    experts: ExpertTable
    """Kept in memory by the owner."""
    activation: Activation
    norm: RmsWeights
    """What comes next reads."""

    def __post_init__(self) -> None:
        if missing := self.experts.missing(np.arange(self.gate.config.num_experts)):
            raise ValueError(f"expert {missing[0]} is not in the table")

    @cached_property
    def norm_weight(self) -> NDArray[np.float32]:
        """As CPU kernels take it."""
        return as_array(self.norm.weight.float())

    @cached_property
    def fields(self) -> Moe:
        """As the kernel takes them."""
        is_sigmoid, num_groups, top_groups, is_top2_sum, renormalize, _, _ = self.gate.rules
        kind, _, _ = cpu_arguments(self.activation)
        return Moe(
            gate_at=address(self.gate.linear.panels),
            gate_size=self.gate.linear.panels.size,
            gate_bias_at=address(self.gate.linear.bias),
            num_experts=self.gate.config.num_experts,
            selection_bias_at=address(self.gate.bias),
            is_sigmoid=is_sigmoid,
            num_groups=num_groups,
            top_groups=top_groups,
            is_top2_sum=is_top2_sum,
            renormalize=renormalize,
            table_at=address(self.experts.addresses_EA),
            table_rows=len(self.experts.addresses_EA),
            like_at=address(self.experts.like),
            like_size=self.experts.like.size,
            width=self.experts.any_expert.down.in_features,
            kind=kind,
            norm_at=address(self.norm_weight),
            round_first=self.norm.round_first,
        )

    @cached_property
    def numbers(self) -> MoeNumbers:
        """As the kernel takes them."""
        *_, renormalize_eps, scale = self.gate.rules
        _, alpha, limit = cpu_arguments(self.activation)
        return MoeNumbers(renormalize_eps, scale, alpha, limit, np.float32(self.norm.eps))


class LayerKey(NamedTuple):
    """What layers must have in common to be computed in one call."""

    rows: np.dtype[np.generic]
    panels: np.dtype[np.generic]
    experts: np.dtype[np.generic]
    top_k: int

    @classmethod
    def of(cls, half: AttentionHalf, moe: LocalMoe, rows: np.dtype[np.generic]) -> LayerKey:
        """Of one layer."""
        return cls(rows, half.like_panels.dtype, moe.experts.like.dtype, moe.gate.config.top_k)


class StepPlaces(NamedTuple):
    """Where the rows of a step find their keys and values."""

    block_tables_GSB: NDArray[np.int32]
    """Blocks of each sequence in order, by KV group."""
    sequence_of_row_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    slots_GT: NDArray[np.int64]
    """block * block_size + offset of each row, by KV group."""


LayerArrays = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]
"""Fields [L, ...] of `Half`, `Numbers`, `Moe` and `MoeNumbers`."""


@dataclass(frozen=True)
class LocalLayers:
    """Successive layers, all of one `LayerKey`."""

    halves: tuple[AttentionHalf, ...]
    moes: tuple[LocalMoe, ...]

    @cached_property
    def arrays(self) -> LayerArrays:
        """Fields of all layers, as the kernel takes them."""
        return (
            np.stack([half.fields for half in self.halves]),
            np.stack([half.numbers for half in self.halves]),
            np.array([moe.fields for moe in self.moes], np.int64),
            np.array([moe.numbers for moe in self.moes], np.float32),
        )

    @property
    def top_k(self) -> int:
        """Experts of a row."""
        return self.moes[0].gate.config.top_k


class LayerPages(NamedTuple):
    """The keys and values of successive layers."""

    pages_LF: NDArray[np.int64]
    group_of_layer_L: NDArray[np.int64]
    """KV group."""
    form: NDArray[np.generic]
    """See `KvCache.form`."""

    @classmethod
    def of(cls, caches: Sequence[KvCache], groups: Sequence[int]) -> LayerPages:
        """Of the caches of layers and their KV groups."""
        pages_LF = np.stack([cache.pages for cache in caches])
        return cls(pages_LF, np.array(groups, np.int64), caches[0].form)

    def part(self, first: int, count: int) -> LayerPages:
        """Of some successive layers."""
        layers = slice(first, first + count)
        return LayerPages(self.pages_LF[layers], self.group_of_layer_L[layers], self.form)


def local_layers_(
    x_TH: Tensor,
    h_TH: Tensor,
    layers: LocalLayers,
    caches: LayerPages,
    places: StepPlaces,
) -> tuple[NDArray[np.int32], float]:
    """The residual stream and what comes next reads, in place.

    Returns the chosen experts, [L, T, K], and the time that gates and experts took, in seconds.

    Args:
        x_TH: The residual stream, contiguous.
        h_TH: What the first layer reads, contiguous.
        layers: Which layers.
        caches: Their keys and values.
        places: Of the rows.
    """
    num_rows = len(places.positions_T)
    ids_LTK = np.empty((len(layers.halves), num_rows, layers.top_k), np.int32)
    first = layers.halves[0]
    likes = (LIKE[x_TH.dtype], first.like_panels, caches.form, layers.moes[0].experts.like[:0])
    experts_ns = cpu_local_layers(
        x_TH.data_ptr(), h_TH.data_ptr(), likes, layers.arrays, caches.pages_LF,
        caches.group_of_layer_L, *places, ids_LTK,
    )  # fmt: skip
    return ids_LTK, experts_ns / 1e9
