"""Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1).

What is remembered of a token is one latent that all heads share, and beside it a key part with
rope. A head's key is k_up(latent), so its score q . k_up(latent) equals k_up^T(q) . latent: the
projection moves to the query, which then meets the latent itself. Values likewise: the weighted sum
is taken over latents, and projected once. So nothing is expanded per remembered token.

T rows, H hidden size, n heads, L width of the latent, R dimensions with rope, D dimensions of a
query head: those without rope first, R with rope last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.layers.norm import Norm
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh.model_config import MlaConfig
from expertmesh_kernels.heads import PackedHeads, head_linear
from expertmesh_kernels.linear import PackedLinear, linear
from expertmesh_kernels.paged_attention import AttentionOptions, paged_attention, write_kv
from expertmesh_kernels.rope import RopeTable, apply_rope


class QueryProjection(Protocol):
    """From hidden states to all query heads."""

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, n * D]"""
        ...


@dataclass(frozen=True)
class FullRankQuery:
    """One matrix."""

    q: PackedLinear

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, n * D]"""
        return linear(h_TH, self.q)


@dataclass(frozen=True)
class LowRankQuery:
    """Two matrices with a norm between."""

    down: PackedLinear
    norm: Norm
    up: PackedLinear

    def __call__(self, h_TH: Tensor) -> Tensor:
        """[T, H] -> [T, n * D]"""
        return linear(self.norm(linear(h_TH, self.down)), self.up)


@dataclass(frozen=True)
class LatentAttention:
    """Latents to the pages, queries in the latent's space, attention, values from latents."""

    layer: int
    config: MlaConfig
    query: QueryProjection
    kv_down: PackedLinear
    """H -> latent, then the key part with rope."""
    kv_norm: Norm
    """Of the latent."""
    rope: RopeTable
    k_up: PackedHeads
    """Per head: query without rope -> latent."""
    options: AttentionOptions
    v_up: PackedHeads
    """Per head: latent -> value."""
    o: PackedLinear

    def __call__(self, h_TH: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, H] -> [T, H]; the rows' latents are in the pages afterwards."""
        kv = inputs.of_layer(self.layer)
        latent_T1D = self._latents(h_TH, inputs.positions_T)
        write_kv(latent_T1D, latent_T1D[..., :0], kv.cache, kv.kv_slots_T)
        mixed_TnL = paged_attention(
            self._queries(h_TH, inputs.positions_T),
            kv.cache,
            kv.block_tables_SB,
            inputs.sequence_of_row_T,
            inputs.positions_T,
            self.options,
        )
        return linear(head_linear(mixed_TnL, self.v_up).flatten(1), self.o)

    def _latents(self, h_TH: Tensor, positions_T: npt.NDArray[np.int32]) -> Tensor:
        """What is remembered of each row, [T, 1, L + R]."""
        latent_T1D = linear(h_TH, self.kv_down)[:, None]
        width = self.config.kv_lora_rank
        latent_T1D[:, 0, :width] = self.kv_norm(latent_T1D[:, 0, :width])
        apply_rope(latent_T1D[..., width:], positions_T, self.rope)
        return latent_T1D

    def _queries(self, h_TH: Tensor, positions_T: npt.NDArray[np.int32]) -> Tensor:
        """Queries against what is remembered, [T, n, L + R]."""
        config = self.config
        q_TnD = self.query(h_TH).view(-1, config.num_heads, config.q_head_dim)
        rope_TnR = q_TnD[..., config.nope_head_dim :]
        apply_rope(rope_TnR, positions_T, self.rope)
        latent_TnL = head_linear(q_TnD[..., : config.nope_head_dim], self.k_up)
        return torch.cat((latent_TnL, rope_TnR), dim=-1)
