"""Grouped-query attention over paged keys and values. T rows, H hidden size, D head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh.model_config import GqaConfig
from expertmesh_kernels.linear import PackedLinear, linear
from expertmesh_kernels.paged_attention import AttentionOptions, paged_attention, write_kv
from expertmesh_kernels.rope import RopeTable, apply_rope


@dataclass(frozen=True)
class Attention:
    """Fused qkv, rope, write to the pages, attention over the pages, output projection."""

    layer: int
    config: GqaConfig
    qkv: PackedLinear
    """H -> heads, then key heads, then value heads, D each."""
    o: PackedLinear
    rope: RopeTable

    @cached_property
    def options(self) -> AttentionOptions:
        """What is done with the scores."""
        config = self.config
        return AttentionOptions(config.scale, config.value_dim, config.sliding_window)

    def __call__(self, h_TH: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, H] -> [T, H]; the rows' keys and values are in the pages afterwards."""
        config = self.config
        num_q = config.num_heads
        num_qk = num_q + config.num_kv_heads
        kv = inputs.of_layer(self.layer)
        qkv_TnD = linear(h_TH, self.qkv).view(-1, num_qk + config.num_kv_heads, config.head_dim)
        q_TnD, k_TnD, v_TnD = qkv_TnD[:, :num_q], qkv_TnD[:, num_q:num_qk], qkv_TnD[:, num_qk:]
        apply_rope(qkv_TnD[:, :num_qk], inputs.positions_T, self.rope)  # in place: q and k
        write_kv(k_TnD, v_TnD, kv.cache, kv.kv_slots_T)
        mixed_TnD = paged_attention(
            q_TnD,
            kv.cache,
            kv.block_tables_SB,
            inputs.sequence_of_row_T,
            inputs.positions_T,
            self.options,
        )
        return linear(mixed_TnD.reshape(len(h_TH), config.q_size), self.o)
