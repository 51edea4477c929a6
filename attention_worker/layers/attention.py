"""Grouped-query attention over paged keys and values. T rows, H hidden size, D head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_worker.layers.heads import HeadEdit, Heads
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh.model_config import GqaConfig
from expertmesh_kernels.linear import PackedLinear, linear
from expertmesh_kernels.paged_attention import AttentionOptions, paged_attention, write_kv


class Attention(Protocol):
    """The first half of a decoder layer."""

    def __call__(self, h_TH: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, H] -> [T, H]; what the layer remembers of the rows is in the pages afterwards."""
        ...


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Fused qkv, edits, write to the pages, attention over the pages, output projection."""

    layer: int
    config: GqaConfig
    qkv: PackedLinear
    """H -> query heads, then key heads, then value heads."""
    edits: tuple[HeadEdit, ...]
    """Applied in order to queries, keys and values."""
    options: AttentionOptions
    o: PackedLinear

    def __call__(self, h_TH: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, H] -> [T, H]; the rows' keys and values are in the pages afterwards."""
        kv = inputs.of_layer(self.layer)
        heads = Heads.split(linear(h_TH, self.qkv), self.config)
        for edit in self.edits:
            edit(heads, inputs.positions_T)
        write_kv(heads.k_TnD, heads.v_TnD, kv.cache, kv.kv_slots_T)
        mixed_TnD = paged_attention(
            heads.q_TnD,
            kv.cache,
            kv.block_tables_SB,
            inputs.sequence_of_row_T,
            inputs.positions_T,
            self.options,
        )
        return linear(mixed_TnD.flatten(1), self.o)
