"""The first half of a decoder layer: attention, and the norm that its FFN reads.

Step by step, or as one kernel where there is one for all of it: then no Python runs between small
kernels. Both compute the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_worker.layers.attention import Attention, GroupedQueryAttention
from attention_worker.layers.heads import QueryKeyNorm, Rope
from attention_worker.layers.norm import NoNorm, Norm, ResidualNorm, RmsNorm
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh_kernels.attention_half import (
    AttentionHalf,
    HeadNorms,
    RmsWeights,
    attention_half_,
)


class FirstHalf(Protocol):
    """x += out_norm(attention(h)); h = ffn_norm(x)."""

    def __call__(
        self, x_TH: Tensor, h_TH: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what the FFN reads, from those before; both may be reused."""
        ...


@dataclass(frozen=True)
class StepByStep:
    """One kernel after the other, of any kind and on any device."""

    attention: Attention
    out_norm: Norm
    ffn_norm: ResidualNorm

    def __call__(
        self, x_TH: Tensor, h_TH: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """See FirstHalf."""
        return self.ffn_norm.add(x_TH, self.out_norm(self.attention(h_TH, inputs)))


@dataclass(frozen=True)
class Compiled:
    """One kernel, on CPU; x and h are changed in place."""

    layer: int
    half: AttentionHalf

    def __call__(
        self, x_TH: Tensor, h_TH: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """See FirstHalf."""
        kv = inputs.of_layer(self.layer)
        attention_half_(
            x_TH, h_TH, self.half, kv.cache, kv.block_tables_SB, inputs.sequence_of_row_T,
            inputs.positions_T, kv.kv_slots_T,
        )  # fmt: skip
        return x_TH, h_TH


def first_half(attention: Attention, out_norm: Norm, ffn_norm: ResidualNorm) -> FirstHalf:
    """As one kernel if there is one for these parts."""
    if (
        isinstance(attention, GroupedQueryAttention)
        and isinstance(out_norm, NoNorm)
        and isinstance(ffn_norm, RmsNorm)
        and attention.qkv.weight.device.type == "cpu"
    ):
        match attention.edits:
            case (Rope() as rope,):
                return _compiled(attention, None, rope, ffn_norm)
            case (QueryKeyNorm() as norms, Rope() as rope):
                return _compiled(attention, norms, rope, ffn_norm)
    return StepByStep(attention, out_norm, ffn_norm)


def _compiled(
    attention: GroupedQueryAttention, norms: QueryKeyNorm | None, rope: Rope, ffn_norm: RmsNorm
) -> Compiled:
    head_norms = None
    if norms is not None:
        head_norms = HeadNorms(norms.q_weight, norms.k_weight, norms.eps, norms.round_first)
    half = AttentionHalf(
        qkv=attention.qkv,
        num_heads=attention.config.num_heads,
        head_norms=head_norms,
        rope=rope.table,
        options=attention.options,
        o=attention.o,
        norm=RmsWeights(ffn_norm.weight_H, ffn_norm.eps, ffn_norm.round_first),
    )
    return Compiled(attention.layer, half)
