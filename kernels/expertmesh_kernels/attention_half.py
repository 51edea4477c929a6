"""The attention half of a decoder layer as one kernel on CPU. T rows, H hidden size.

It computes what its parts compute one by one (`linear`, `rms_norm_heads_`, `apply_rope`,
`write_kv`, `paged_attention`, `add_rms_norm`), to the bit. Between small kernels Python costs more
than most of them: a decode step of one row spent a third of its time there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.attention_half import Half, Numbers
from expertmesh_kernels.cpu.attention_half import attention_half as cpu_attention_half
from expertmesh_kernels.host import LIKE, address, as_array
from expertmesh_kernels.linear import PackedLinear
from expertmesh_kernels.paged_attention import AttentionOptions, KvCache
from expertmesh_kernels.rope import RopeTable


@dataclass(frozen=True)
class RmsWeights:
    """An RMS norm; see `rms_norm`."""

    weight: Tensor
    """float32."""
    eps: float
    round_first: bool


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of queries and keys; see `rms_norm_heads_`."""

    q_weight: Tensor
    """float32, of a head, or of all heads of a row where they are normalised at once."""
    k_weight: Tensor
    eps: float
    round_first: bool


@dataclass(frozen=True)
class AttentionHalf:
    """What a layer consists of up to its FFN. On CPU.

    Raises:
        ValueError: The parts do not fit each other.
    """

    qkv: PackedLinear
    """H -> query heads, then key heads, then value heads."""
    num_heads: int
    """Of queries."""
    head_norms: HeadNorms | None
    rope: RopeTable
    options: AttentionOptions
    o: PackedLinear
    norm: RmsWeights
    """What the FFN reads."""

    def __post_init__(self) -> None:
        width = self.num_heads * self.options.value_dim
        if self.o.in_features != width or self.o.out_features != self.qkv.in_features:
            raise ValueError(
                f"o is {self.o.in_features} to {self.o.out_features}, "
                f"expected {width} to {self.qkv.in_features}"
            )
        if self.o.panels.dtype != self.qkv.panels.dtype:
            raise ValueError(f"o is {self.o.panels.dtype}, expected {self.qkv.panels.dtype} as qkv")

    @cached_property
    def _owned(self) -> tuple[NDArray[np.generic], ...]:
        """Arrays that `fields` has the addresses of, those of options that are there."""
        norms = self.head_norms
        weights = () if norms is None else (norms.q_weight, norms.k_weight)
        return (
            *(layer.bias for layer in (self.qkv, self.o)),
            *self.rope.arrays,
            self.options.sinks,
            as_array(self.norm.weight.float()),
            *(as_array(weight.float()) for weight in weights),
        )

    @cached_property
    def fields(self) -> NDArray[np.int64]:
        """The fields of `Half`, as the kernel takes them."""
        qkv_bias, o_bias, cos, sin, sinks, norm, *head_norms = self._owned
        q_norm, k_norm = head_norms or (cos[:0], cos[:0])
        _, window, _ = self.options.scores
        half = Half(
            hidden=self.qkv.in_features,
            qkv_at=address(self.qkv.panels),
            qkv_size=self.qkv.panels.size,
            qkv_depth=self.qkv.depth,
            qkv_columns=self.qkv.out_features,
            qkv_bias_at=address(qkv_bias),
            q_norm_at=address(q_norm),
            q_norm_size=q_norm.size,
            k_norm_at=address(k_norm),
            k_norm_size=k_norm.size,
            cos_at=address(cos),
            sin_at=address(sin),
            num_positions=cos.shape[0],
            num_pairs=cos.shape[1],
            is_interleaved=self.rope.interleaved,
            num_heads=self.num_heads,
            value_dim=self.options.value_dim,
            window=window,
            sinks_at=address(sinks),
            o_at=address(self.o.panels),
            o_size=self.o.panels.size,
            o_depth=self.o.depth,
            o_bias_at=address(o_bias),
            norm_at=address(norm),
            heads_round_first=self.head_norms is not None and self.head_norms.round_first,
            round_first=self.norm.round_first,
        )
        return np.array(half, np.int64)

    @cached_property
    def numbers(self) -> NDArray[np.float32]:
        """The fields of `Numbers`, as the kernel takes them."""
        scale, _, softcap = self.options.scores
        heads_eps = 0.0 if self.head_norms is None else self.head_norms.eps
        values = Numbers(scale, softcap, np.float32(heads_eps), np.float32(self.norm.eps))
        return np.array(values, np.float32)

    @cached_property
    def like_panels(self) -> NDArray[np.generic]:
        """An empty array of the type of the packed weights."""
        return self.qkv.panels[:0]


def attention_half_(
    x_TH: Tensor,
    h_TH: Tensor,
    half: AttentionHalf,
    cache: KvCache,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    slots_T: NDArray[np.int64],
) -> None:
    """x += attention(h), h = norm(x), in place; the rows' keys and values are in the pages then.

    Args:
        x_TH: The residual stream, contiguous.
        h_TH: What attention reads, contiguous.
        half: The layer.
        cache: See `paged_attention`, as for the next three.
        block_tables_SB: C-contiguous int32.
        sequence_of_row_T: int32.
        positions_T: int32.
        slots_T: See `write_kv`; int64.
    """
    check_rows(x_TH, h_TH, half, len(positions_T))
    if x_TH.dtype != cache.dtype:
        raise ValueError(f"x is {x_TH.dtype}, expected {cache.dtype} as the pool")
    cpu_attention_half(
        x_TH.data_ptr(), h_TH.data_ptr(), LIKE[x_TH.dtype], half.like_panels, cache.form,
        half.fields, half.numbers, cache.pages, block_tables_SB, sequence_of_row_T, positions_T,
        slots_T,
    )  # fmt: skip


def check_rows(x_TH: Tensor, h_TH: Tensor, half: AttentionHalf, num_rows: int) -> None:
    """Raises ValueError unless x and h are as kernels write them in place."""
    rows = (num_rows, half.qkv.in_features)
    if x_TH.shape != rows or h_TH.shape != rows or x_TH.dtype != h_TH.dtype:
        raise ValueError(
            f"x is {x_TH.dtype} {tuple(x_TH.shape)} and h {h_TH.dtype} {tuple(h_TH.shape)}, "
            f"expected twice {rows} of one type"
        )
    if not (x_TH.is_contiguous() and h_TH.is_contiguous()):
        raise ValueError("x and h have gaps, expected contiguous rows")
