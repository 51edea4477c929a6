"""Decoder layers as one kernel on CPU, with experts in this process or on expert workers.

T rows, L layers, K top-k, S sequences, B blocks, G KV groups. Bits are those of
`attention_half_`, `choose_experts`, experts and `add_rms_norm`, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.activation import cpu_arguments
from expertmesh_kernels.attention_half import AttentionHalf, RmsWeights, check_rows
from expertmesh_kernels.cpu.layers import Moe, MoeNumbers
from expertmesh_kernels.cpu.layers import local_layers as cpu_local_layers
from expertmesh_kernels.cpu.remote_layers import BEGUN_NS, DISPATCH_NS, IS_SENT, NUM_REPORT_WORDS
from expertmesh_kernels.cpu.remote_layers import remote_layers as cpu_remote_layers
from expertmesh_kernels.grouped_mlp import ExpertTable
from expertmesh_kernels.host import LIKE, address, as_array
from expertmesh_kernels.paged_attention import KvCache
from expertmesh_kernels.router import Gate


@dataclass(frozen=True)
class RemoteMoe:
    """The second half of a layer, whose experts are elsewhere."""

    gate: Gate
    norm: RmsWeights
    """What comes next reads."""

    @cached_property
    def norm_weight(self) -> NDArray[np.float32]:
        """As CPU kernels take it."""
        return as_array(self.norm.weight.float())

    @property
    def expert_type(self) -> np.dtype[np.generic] | None:
        """Of the packed weights of experts that are here."""
        return None

    @cached_property
    def fields(self) -> Moe:
        """As the kernel takes them."""
        is_sigmoid, num_groups, top_groups, is_top2_sum, renormalize, _, _ = self.gate.rules
        return Moe(
            hidden=self.gate.linear.in_features,
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
            norm_at=address(self.norm_weight),
            round_first=self.norm.round_first,
            table_at=0,
            table_rows=0,
            like_at=0,
            like_size=0,
            width=0,
            kind=0,
        )

    @cached_property
    def numbers(self) -> MoeNumbers:
        """As the kernel takes them."""
        *_, renormalize_eps, scale = self.gate.rules
        nothing = np.float32(0.0)
        return MoeNumbers(renormalize_eps, scale, nothing, nothing, np.float32(self.norm.eps))


@dataclass(frozen=True)
class LocalMoe(RemoteMoe):
    """The second half of a layer, whose experts are all here.

    Raises:
        ValueError: An expert is not in the table.
    """

    experts: ExpertTable
    """Kept in memory by the owner."""
    activation: Activation

    def __post_init__(self) -> None:
        if missing := self.experts.missing(np.arange(self.gate.config.num_experts)):
            raise ValueError(f"expert {missing[0]} is not in the table")

    @property
    def expert_type(self) -> np.dtype[np.generic] | None:
        """See RemoteMoe."""
        return self.experts.like.dtype

    @cached_property
    def fields(self) -> Moe:
        """As the kernel takes them."""
        kind, _, _ = cpu_arguments(self.activation)
        return super().fields._replace(
            table_at=address(self.experts.addresses_EA),
            table_rows=len(self.experts.addresses_EA),
            like_at=address(self.experts.like),
            like_size=self.experts.like.size,
            width=self.experts.any_expert.down.in_features,
            kind=kind,
        )

    @cached_property
    def numbers(self) -> MoeNumbers:
        """As the kernel takes them."""
        _, alpha, limit = cpu_arguments(self.activation)
        return super().numbers._replace(alpha=alpha, limit=limit)


M = TypeVar("M", bound=RemoteMoe)


class LayerKey(NamedTuple):
    """What layers must have in common to be computed in one call."""

    rows: np.dtype[np.generic]
    panels: np.dtype[np.generic]
    experts: np.dtype[np.generic] | None
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, half: AttentionHalf, moe: RemoteMoe, rows: np.dtype[np.generic]) -> LayerKey:
        """Of one layer."""
        gate = moe.gate.config
        panels = half.like_panels.dtype
        return cls(rows, panels, moe.expert_type, gate.top_k, gate.num_experts)


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
class Layers(Generic[M]):
    """Successive layers, all of one `LayerKey`."""

    halves: tuple[AttentionHalf, ...]
    moes: tuple[M, ...]

    @cached_property
    def arrays(self) -> LayerArrays:
        """Fields of all layers, as the kernels take them."""
        return (
            np.stack([half.fields for half in self.halves]),
            np.stack([half.numbers for half in self.halves]),
            np.array([moe.fields for moe in self.moes], np.int64),
            np.array([moe.numbers for moe in self.moes], np.float32),
        )

    def choices_shape(self, num_rows: int) -> tuple[int, int, int]:
        """[L, T, K]."""
        return len(self.halves), num_rows, self.moes[0].gate.config.top_k

    def likes(
        self, x_TH: Tensor, caches: LayerPages
    ) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
        """Empty arrays of the types of rows, packed weights and panels of keys."""
        return LIKE[x_TH.dtype], self.halves[0].like_panels, caches.form


class LayerPages(NamedTuple):
    """The keys and values of successive layers."""

    pages_LF: NDArray[np.int64]
    """See `KvCache.pages`."""
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
    layers: Layers[LocalMoe],
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
    check_rows(x_TH, h_TH, layers.halves[0], len(places.positions_T))
    ids_LTK = np.empty(layers.choices_shape(len(places.positions_T)), np.int32)
    likes = (*layers.likes(x_TH, caches), layers.moes[0].experts.like[:0])
    experts_ns = cpu_local_layers(
        x_TH.data_ptr(), h_TH.data_ptr(), likes, layers.arrays, caches.pages_LF,
        caches.group_of_layer_L, *places, ids_LTK,
    )  # fmt: skip
    return ids_LTK, experts_ns / 1e9


class ExchangeWords(NamedTuple):
    """See `expertmesh_kernels.cpu.exchange_words`."""

    state: NDArray[np.int64]
    links_W: NDArray[np.int64]
    calls_WC: NDArray[np.int64]


class LayerRoutes(NamedTuple):
    """Where the rows of successive layers go."""

    is_fixed_L: NDArray[np.bool_]
    """Whether each expert has one copy; the four are those of `exchange_words.Route`."""
    worker_of_expert_LE: NDArray[np.int32]
    copies_LER: NDArray[np.int32]
    penalty_W: NDArray[np.int64]


class CallLimits(NamedTuple):
    """What holds for the exchanges of a step."""

    num_generated_rows: int
    """Leading rows that belong to generated tokens."""
    timeout_s: float
    """Longest time of one layer's exchange."""
    step_deadline_s: float
    """On the monotonic clock."""


class RemotePass:
    """A pass through successive layers, in as many calls as it takes.

    Args:
        layers: Which layers.
        first_layer: Number of the first one in the model.
        caches: Their keys and values.
        places: Of the rows.
    """

    def __init__(
        self,
        layers: Layers[RemoteMoe],
        first_layer: int,
        caches: LayerPages,
        places: StepPlaces,
    ) -> None:
        self._layers, self._first_layer = layers, first_layer
        self._caches, self._places = caches, places
        shape = layers.choices_shape(len(places.positions_T))
        self.ids_LTK = np.empty(shape, np.int32)
        """The experts chosen so far."""
        self.weights_LTK = np.empty(shape, np.float32)
        self._report = np.zeros(NUM_REPORT_WORDS, np.int64)

    def run_(
        self,
        x_TH: Tensor,
        h_TH: Tensor,
        begin: int,
        exchange: ExchangeWords,
        routes: LayerRoutes,
        limits: CallLimits,
    ) -> int:
        """Rows through layers from `begin` on, in place; how far that went.

        If that is not all, the layer it ended in is complete but for its experts: x is the residual
        stream, h what they read.
        """
        check_rows(x_TH, h_TH, self._layers.halves[0], len(self._places.positions_T))
        return cpu_remote_layers(
            x_TH.data_ptr(), h_TH.data_ptr(), self._layers.likes(x_TH, self._caches),
            self._layers.arrays, self._caches.pages_LF, self._caches.group_of_layer_L,
            *self._places, self.ids_LTK, self.weights_LTK, (*exchange,), (*routes,), begin,
            self._first_layer, *limits, self._report,
        )  # fmt: skip

    @property
    def is_sent(self) -> bool:
        """Whether the rows of the layer that the last run ended in are on their way."""
        return bool(self._report[IS_SENT])

    @property
    def begun_s(self) -> float:
        """When their exchange began, on the monotonic clock."""
        return float(self._report[BEGUN_NS] / 1e9)

    @property
    def times_s(self) -> tuple[float, float, float]:
        """To hand over rows, to wait, and what the slowest expert workers computed, in seconds."""
        dispatch_ns, wait_ns, busy_us = self._report[DISPATCH_NS:].tolist()
        return dispatch_ns / 1e9, wait_ns / 1e9, busy_us / 1e6
