"""The layers of a model in the pieces in which a forward pass goes through them.

A stage is one layer, which pauses while its rows travel; or, where all experts are in this process
and there is one kernel for such layers, as many successive layers as go into one call.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from attention_worker.experts import ExpertClient, LocalExperts
from attention_worker.layers.attention_half import Compiled
from attention_worker.layers.ffn import ExpertCalls, MoeFfn
from attention_worker.layers.norm import NoNorm, ResidualNorm, RmsNorm
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh_kernels.attention_half import AttentionHalf, RmsWeights
from expertmesh_kernels.decoder_layers import LayerKey, LocalLayers, LocalMoe, local_layers_
from expertmesh_kernels.host import LIKE

if TYPE_CHECKING:
    from attention_worker.model import DecoderLayer, Model

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
    layers: LocalLayers

    def run(
        self, rows: Rows, inputs: AttentionInputs, calls: ExpertCalls
    ) -> Generator[None, None, Rows]:
        """See Stage; never pauses."""
        pages = inputs.pages.part(self.first, len(self.layers.halves))
        ids_LTK, experts_s = local_layers_(*rows, self.layers, pages, inputs.places)
        calls.dispatch_s += experts_s
        for topk_ids_TK in ids_LTK:
            calls.recorder.record(topk_ids_TK)
        return rows
        yield


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
    if not isinstance(experts, LocalExperts):
        return Stages(single, single)
    return Stages(_joined(model, single, experts), single)


def _joined(model: Model, single: tuple[OneLayer, ...], experts: LocalExperts) -> tuple[Stage, ...]:
    """Successive layers that one kernel takes are one stage."""
    like = LIKE[model.dtype].dtype
    parts = [_compiled_parts(stage, experts) for stage in single]
    stages: list[Stage] = []
    for key, run in groupby(range(len(single)), lambda i: _key(parts[i], like)):
        indices = list(run)
        if key is None:
            stages += [single[i] for i in indices]
        else:
            halves, moes = zip(*(found for i in indices if (found := parts[i])), strict=True)
            stages.append(CompiledLayers(indices[0], LocalLayers(halves, moes)))
    return tuple(stages)


_Parts = tuple[AttentionHalf, LocalMoe]


def _compiled_parts(stage: OneLayer, experts: LocalExperts) -> _Parts | None:
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
    table, activation = experts.resident(ffn.layer)
    return first.half, LocalMoe(ffn.gate, table, activation, weights)


def _key(parts: _Parts | None, rows: np.dtype[np.generic]) -> LayerKey | None:
    return None if parts is None else LayerKey.of(*parts, rows)
