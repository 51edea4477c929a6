"""The layers of a model in the pieces in which a forward pass goes through them.

A stage is one layer, which pauses while its rows travel; or, where there is a kernel for such
layers, as many successive ones as go into one call: with all experts in this process, or on expert
workers as long as all is as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from torch import Tensor

from attention_worker.exchange import Dispatch, Exchange
from attention_worker.experts import ExpertClient, LocalExperts, Pending, RemoteExperts
from attention_worker.layers.attention_half import Compiled
from attention_worker.layers.ffn import ExpertCalls, MoeFfn
from attention_worker.layers.norm import NoNorm, ResidualNorm, RmsNorm
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh_kernels.attention_half import AttentionHalf, RmsWeights
from expertmesh_kernels.decoder_layers import (
    CallLimits,
    LayerKey,
    Layers,
    LocalMoe,
    RemoteMoe,
    RemotePass,
    local_layers_,
)
from expertmesh_kernels.host import LIKE
from expertmesh_kernels.router import Routing

if TYPE_CHECKING:
    from attention_worker.model import DecoderLayer, Model

M = TypeVar("M", bound=RemoteMoe)

Rows = tuple[Tensor, Tensor]
"""The residual stream, and what is read of it next, [T, H] each."""


class Stage(Protocol):
    """Some successive layers."""

    def run(
        self, rows: Rows, inputs: AttentionInputs, calls: ExpertCalls
    ) -> Generator[None, None, Rows]:
        """The rows after the layers; those before may be reused. Pauses while rows travel.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy within its deadline.
        """
        ...


@dataclass(frozen=True)
class OneLayer:
    """Any layer, with its experts anywhere."""

    layer: DecoderLayer
    next_norm: ResidualNorm
    """What reads the residual stream after it."""

    def run(
        self, rows: Rows, inputs: AttentionInputs, calls: ExpertCalls
    ) -> Generator[None, None, Rows]:
        """See Stage."""
        layer = self.layer
        x_TH, h_TH = layer.first_half(*rows, inputs)
        begun = layer.ffn.begin(h_TH, calls)
        yield
        return self.next_norm.add(x_TH, layer.ffn_out_norm(begun.result()))


@dataclass(frozen=True)
class CompiledLayers:
    """Layers with their experts, in one call."""

    first: int
    """Index of the first layer."""
    layers: Layers[LocalMoe]

    def run(
        self, rows: Rows, inputs: AttentionInputs, calls: ExpertCalls
    ) -> Generator[None, None, Rows]:
        """See Stage; never pauses."""
        pages = inputs.pages.part(self.first, len(self.layers.halves))
        ids_LTK, experts_s = local_layers_(*rows, self.layers, pages, inputs.places)
        calls.dispatch_s += experts_s
        calls.chosen(self.first, ids_LTK)
        return rows
        yield


@dataclass(frozen=True)
class ExchangingLayers:
    """Layers with their experts on expert workers, in one call as long as all is as usual."""

    first: int
    """Index of the first layer."""
    layers: Layers[RemoteMoe]
    single: tuple[OneLayer, ...]
    """The same layers."""
    exchange: Exchange

    def run(
        self, rows: Rows, inputs: AttentionInputs, calls: ExpertCalls
    ) -> Generator[None, None, Rows]:
        """See Stage; pauses in layers for which the exchange has no memory."""
        count, top_k = len(self.single), self.layers.moes[0].gate.config.top_k
        pages = inputs.pages.part(self.first, count)
        through = RemotePass(self.layers, self.first, pages, inputs.places)
        routes = self.exchange.routes(self.first, count)
        limits = CallLimits(calls.num_generated_rows, float(calls.timeout_s), calls.step_deadline_s)
        layer = 0
        try:
            while layer < count:
                words = self.exchange.words_for(rows[1], top_k)
                if words is None:
                    rows = yield from self.single[layer].run(rows, inputs, calls)
                    layer += 1
                    continue
                ended = through.run_(*rows, layer, words, routes, limits)
                calls.chosen(self.first + layer, through.ids_LTK[layer : ended + 1])
                if ended < count:
                    rows = self._finish(ended, rows, through, calls)
                layer = ended + 1
        finally:
            calls.add_times(*through.times_s)
        return rows

    def _finish(self, layer: int, rows: Rows, through: RemotePass, calls: ExpertCalls) -> Rows:
        """The rows after a layer whose experts were not reached as usual."""
        x_TH, h_TH = rows
        number, num_experts = self.first + layer, self.layers.moes[layer].gate.config.num_experts
        routing = Routing.of(through.ids_LTK[layer], through.weights_LTK[layer], num_experts)
        pending: Pending
        if through.is_sent:
            deadline_s = min(through.begun_s + calls.timeout_s, calls.step_deadline_s)
            pending = self.exchange.sent_elsewhere(
                Dispatch(number, 0, h_TH, routing, calls.num_generated_rows, deadline_s)
            )
        else:
            pending = calls.dispatch(number, h_TH, routing)
        return self.single[layer].next_norm.add(x_TH, calls.wait_for(pending))


@dataclass(frozen=True)
class Stages:
    """All layers of a model, in two ways."""

    few: tuple[Stage, ...]
    """As few as there can be: nothing else runs while rows travel."""
    pausing: tuple[Stage, ...]
    """Each pauses while its rows travel: another micro-batch may run then."""


def choose_stages(model: Model, experts: ExpertClient) -> Stages:
    """The stages of a model with these experts."""
    single = tuple(map(OneLayer, model.layers, model.next_norms))
    if isinstance(experts, LocalExperts):
        return Stages(tuple(_local_stages(model, single, experts)), single)
    if isinstance(experts, RemoteExperts) and experts.exchange is not None:
        return Stages(tuple(_exchanging_stages(model, single, experts.exchange)), single)
    return Stages(single, single)


def _local_stages(
    model: Model, single: tuple[OneLayer, ...], experts: LocalExperts
) -> Iterator[Stage]:
    """Successive layers that one kernel takes are one stage."""

    def local(moe: RemoteMoe, layer: int) -> LocalMoe:
        return LocalMoe(moe.gate, moe.norm, *experts.resident(layer))

    for first, run, layers in _runs(model, single, local):
        if layers is None:
            yield from run
        else:
            yield CompiledLayers(first, layers)


def _exchanging_stages(
    model: Model, single: tuple[OneLayer, ...], exchange: Exchange
) -> Iterator[Stage]:
    """Likewise."""
    for first, run, layers in _runs(model, single, lambda moe, layer: moe):
        if layers is None:
            yield from run
        else:
            yield ExchangingLayers(first, layers, run, exchange)


def _runs(
    model: Model, single: tuple[OneLayer, ...], place: Callable[[RemoteMoe, int], M]
) -> Iterator[tuple[int, tuple[OneLayer, ...], Layers[M] | None]]:
    """Index of the first, layers, and how one kernel takes them all; None if none does."""
    parts = [_parts(stage, place) for stage in single]
    rows = LIKE[model.dtype].dtype
    for key, run in groupby(range(len(single)), lambda i: _key(parts[i], rows)):
        indices = list(run)
        stages = tuple(single[i] for i in indices)
        if key is None:
            yield indices[0], stages, None
        else:
            halves, moes = zip(*(found for i in indices if (found := parts[i])), strict=True)
            yield indices[0], stages, Layers(halves, moes)


def _parts(stage: OneLayer, place: Callable[[RemoteMoe, int], M]) -> tuple[AttentionHalf, M] | None:
    """What a kernel for whole layers takes; None if there is none for such a layer."""
    layer, norm = stage.layer, stage.next_norm
    first, ffn = layer.first_half, layer.ffn
    if not (
        isinstance(first, Compiled)
        and isinstance(ffn, MoeFfn)
        and not ffn.shared
        and isinstance(layer.ffn_out_norm, NoNorm)
        and isinstance(norm, RmsNorm)
    ):
        return None
    weights = RmsWeights(norm.weight_H, norm.eps, norm.round_first)
    return first.half, place(RemoteMoe(ffn.gate, weights), ffn.layer)


def _key(parts: tuple[AttentionHalf, M] | None, rows: np.dtype[np.generic]) -> LayerKey | None:
    return None if parts is None else LayerKey.of(*parts, rows)
