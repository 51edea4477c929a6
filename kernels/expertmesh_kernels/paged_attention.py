"""Attention over paged keys and values. T rows, n query heads, D head size, S sequences, B blocks.

All layers share one pool of equal blocks, and a layer has the same part of every block that it
uses. What lies where inside that part is private to this module (`expertmesh_kernels.cpu.pages`).
Whole blocks may be copied; positions inside a block may not.

A pool may hold int8 codes, on CPU: each key and each value of a head is rounded to a multiple of
its own factor, the largest of its elements / 127, when it is written, and multiplied when it is
read. What a row gets thus depends on the tokens that it sees, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.cpu.attention import paged_attention as cpu_paged_attention
from expertmesh_kernels.cpu.features import has_amx
from expertmesh_kernels.cpu.pages import Int8Pages, Pages
from expertmesh_kernels.cpu.pages import write_kv as cpu_write_kv
from expertmesh_kernels.host import as_array, as_input, row_stride

_UNLIMITED = 1 << 40
_NO_SINKS = np.empty(0, np.float32)
_TILES = np.empty(0, np.uint32)
_CHAINS = np.empty(0, np.float32)
_SCALE_BYTES = 4
_LEAST_PEAK = 1e-35
"""Of elements that are not all zero when they are held as int8."""


@dataclass(frozen=True)
class Int8KvLayout(KvLayout):
    """What a layer remembers of a token as int8 codes, with two FP32 factors for each head.

    Raises:
        ValueError: It is a latent.
    """

    def __post_init__(self) -> None:
        if not self.value_dim:
            raise ValueError("a latent cannot be held as int8")

    @property
    def width(self) -> int:
        """Bytes per token, a multiple of 4."""
        return (2 * _SCALE_BYTES) * self.num_heads + -(-super().width // 4) * 4


@dataclass(frozen=True)
class KvCache:
    """One layer's keys and values inside the pool.

    Raises:
        ValueError: The layer's part does not lie within a block, or the pool has gaps, or is not of
            the type that the layout needs.
    """

    pool: Tensor
    """[num_blocks, block_elements]; shared by all layers. Of the model's dtype, or int8."""
    offset: int
    """Elements from the start of a block to the layer's keys; its values follow them. With int8:
    to its factors, which keys and values follow."""
    layout: KvLayout
    """Int8KvLayout if the pool is int8."""
    block_size: int
    """Tokens per block."""
    row_dtype: torch.dtype | None = None
    """Of keys, values and queries; None for that of the pool."""

    def __post_init__(self) -> None:
        if self.is_int8 != (self.pool.dtype == torch.int8) or self.dtype == torch.int8:
            raise ValueError(f"pool and rows are {self.pool.dtype} and {self.dtype}, {self.layout}")
        if self.is_int8 and (self.offset % 4 or self.pool.shape[-1] % 4):
            raise ValueError(f"byte {self.offset} of {self.pool.shape[-1]} is no place for factors")
        if self.pool.ndim != 2 or not self.pool.is_contiguous():
            raise ValueError(
                f"pool has shape {tuple(self.pool.shape)} and strides {self.pool.stride()}, "
                "expected contiguous [num_blocks, block_elements]"
            )
        if self.offset < 0 or self.offset + self.elements > self.pool.shape[1]:
            raise ValueError(
                f"elements {self.offset} to {self.offset + self.elements} of a block are not "
                f"within its {self.pool.shape[1]}"
            )

    @property
    def is_int8(self) -> bool:
        """Whether the pool holds codes."""
        return isinstance(self.layout, Int8KvLayout)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and queries."""
        return self.row_dtype or self.pool.dtype

    @property
    def elements(self) -> int:
        """Elements of a block that are this layer's."""
        return self.layout.width * self.block_size

    @property
    def num_scales(self) -> int:
        """Factors of a block's keys, and as many of its values."""
        return self.layout.num_heads * self.block_size if self.is_int8 else 0

    @cached_property
    def pages(self) -> NDArray[np.integer]:
        """Where keys and values are: the fields of `Pages`, as CPU kernels take them; or of
        `Int8Pages`, in uint64, by which kernels tell them apart."""
        layout = self.layout
        num_keys = layout.num_heads * layout.key_dim * self.block_size
        keys_at = self.offset + 2 * _SCALE_BYTES * self.num_scales
        fields = Pages(
            address=self.pool.data_ptr(),
            size=self.pool.numel(),
            block_stride=self.pool.shape[1],
            keys_at=keys_at,
            values_at=keys_at + num_keys,
            num_heads=layout.num_heads,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            block_size=self.block_size,
        )
        if not self.is_int8:
            return np.array(fields, np.int64)
        key_scales_at = self.offset // _SCALE_BYTES
        int8 = Int8Pages(*fields, key_scales_at, key_scales_at + self.num_scales)
        return np.array(int8, np.uint64)

    @cached_property
    def like(self) -> NDArray[np.generic]:
        """An empty array of the type in which CPU kernels see keys, values and queries."""
        return as_array(torch.empty(0, dtype=self.dtype))

    @cached_property
    def form(self) -> NDArray[np.generic]:
        """An empty array of the type of the panels that CPU kernels multiply."""
        return _TILES if self.dtype == torch.bfloat16 and has_amx() else _CHAINS


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer does with scores; made once per layer."""

    scale: float
    """Factor of the scores."""
    value_dim: int
    """Width of a head's output. If the layout has no values: how much of a key is the value."""
    sliding_window: int | None = None
    """Keys that a row sees, itself included; None for all."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks_n: Tensor | None = None
    """float32 [n]: a logit of each head that takes part in the softmax and has no value."""

    @cached_property
    def scores(self) -> tuple[np.float32, int, np.float32]:
        """Scale, window and cap as CPU kernels take them."""
        window = self.sliding_window or _UNLIMITED
        return np.float32(self.scale), window, np.float32(self.softcap or 0.0)

    @cached_property
    def sinks(self) -> NDArray[np.float32]:
        """The sinks as CPU kernels take them: empty if there are none."""
        return _NO_SINKS if self.sinks_n is None else as_array(self.sinks_n.float())


def write_kv(k_TnD: Tensor, v_TnD: Tensor, cache: KvCache, slots_T: NDArray[np.int64]) -> None:
    """Store the keys and values of new tokens.

    Args:
        k_TnD: Keys, of the cache's dtype; may be a column slice of a larger tensor.
        v_TnD: Values, likewise; D is 0 if the layout has no values.
        cache: Where to.
        slots_T: block * block_size + offset of each row; rows are written in order.
    """
    layout = cache.layout
    _check_rows("keys", k_TnD, cache, (layout.num_heads, layout.key_dim))
    _check_rows("values", v_TnD, cache, (layout.num_heads, layout.value_dim))
    if k_TnD.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        ops.run_write_kv(k_TnD, v_TnD, cache, slots_T)
        return
    if k_TnD.device.type != "cpu":
        write_kv_reference(k_TnD, v_TnD, cache, slots_T)
        return
    cpu_write_kv(
        k_TnD.data_ptr(), row_stride(k_TnD), v_TnD.data_ptr(), row_stride(v_TnD), cache.pages,
        cache.like, as_input(slots_T, np.int64),
    )  # fmt: skip


def paged_attention(
    q_TnD: Tensor,
    cache: KvCache,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    options: AttentionOptions,
) -> Tensor:
    """Causal grouped-query attention, [T, n, value_dim], in the dtype of q.

    Rows may come in any order; runs of successive positions of one sequence are faster. FP32
    inside, rounded once.

    Args:
        q_TnD: Queries; may be a column slice of a larger tensor.
        cache: Where the keys and values that a row sees are written.
        block_tables_SB: Blocks of each sequence in order. Entries beyond its length are ignored.
            Before a row's window they must be blocks of the pool, of any content.
        sequence_of_row_T: Which row of `block_tables_SB` a row belongs to.
        positions_T: Position of each row in its sequence.
        options: What is done with the scores.
    """
    _check_queries(q_TnD, cache, options)
    if q_TnD.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_attention(
            q_TnD, cache, block_tables_SB, sequence_of_row_T, positions_T, options
        )
    if q_TnD.device.type != "cpu":
        return paged_attention_reference(
            q_TnD, cache, block_tables_SB, sequence_of_row_T, positions_T, options
        )
    num_heads = q_TnD.shape[1]
    out_TnD = q_TnD.new_empty(q_TnD.shape[0], num_heads, options.value_dim)
    cpu_paged_attention(
        q_TnD.data_ptr(), row_stride(q_TnD), out_TnD.data_ptr(), cache.like, cache.form,
        cache.pages, as_input(block_tables_SB, np.int32),
        as_input(sequence_of_row_T, np.int32), as_input(positions_T, np.int32),
        num_heads, options.value_dim, *options.scores, options.sinks,
    )  # fmt: skip
    return out_TnD


def write_kv_reference(
    k_TnD: Tensor, v_TnD: Tensor, cache: KvCache, slots_T: NDArray[np.int64]
) -> None:
    """What `write_kv` does, in PyTorch; for different slots."""
    slots = torch.from_numpy(np.array(slots_T)).to(cache.pool.device)
    blocks_T, offsets_T = slots // cache.block_size, slots % cache.block_size
    keys_BnDL, values_BnLD = _views(cache)
    if cache.is_int8:
        key_scales_BnL, value_scales_BnL = _scales(cache)
        k_TnD, key_scales_BnL[blocks_T, :, offsets_T] = _quantized(k_TnD)
        v_TnD, value_scales_BnL[blocks_T, :, offsets_T] = _quantized(v_TnD)
    keys_BnDL[blocks_T, :, :, offsets_T] = k_TnD
    values_BnLD[blocks_T, :, offsets_T] = v_TnD


def _quantized(rows_TnD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, n, D] and factors [T, n]."""
    wide_TnD = rows_TnD.float()
    peaks_Tn = wide_TnD.abs().amax(-1)
    is_usual_Tn = peaks_Tn.isfinite() & (peaks_Tn >= _LEAST_PEAK)
    factors_Tn = torch.where(is_usual_Tn, 127.0 / peaks_Tn, 0.0)
    codes_TnD = torch.where(is_usual_Tn[..., None], (wide_TnD * factors_Tn[..., None]).round(), 0.0)
    scales_Tn = torch.where(is_usual_Tn, peaks_Tn / 127.0, 0.0)
    return codes_TnD.to(torch.int8), torch.where(peaks_Tn.isfinite(), scales_Tn, torch.nan)


def paged_attention_reference(
    q_TnD: Tensor,
    cache: KvCache,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    options: AttentionOptions,
) -> Tensor:
    """What `paged_attention` computes, in PyTorch, row by row."""
    out_TnD = q_TnD.new_empty(*q_TnD.shape[:2], options.value_dim)
    group = q_TnD.shape[1] // cache.layout.num_heads
    for t, (sequence, position) in enumerate(zip(sequence_of_row_T, positions_T, strict=True)):
        end = int(position) + 1
        start = max(0, end - (options.sliding_window or _UNLIMITED))
        table = np.array(block_tables_SB[sequence, : -(-end // cache.block_size)], np.int64)
        k_nLD, v_nLD = (
            part[:, start:end].float().repeat_interleave(group, 0)
            for part in _gather(cache, torch.from_numpy(table).to(cache.pool.device), options)
        )
        scores_nL = (k_nLD @ q_TnD[t, :, :, None].float())[..., 0] * options.scale
        out_TnD[t] = (_softmax(scores_nL, options)[:, None] @ v_nLD)[:, 0].to(q_TnD.dtype)
    return out_TnD


def _softmax(scores_nL: Tensor, options: AttentionOptions) -> Tensor:
    if options.softcap:
        scores_nL = options.softcap * torch.tanh(scores_nL / options.softcap)
    if options.sinks_n is None:
        return scores_nL.softmax(-1)
    return torch.cat([scores_nL, options.sinks_n[:, None]], -1).softmax(-1)[:, :-1]


def _views(cache: KvCache) -> tuple[Tensor, Tensor]:
    """Keys [blocks, kv heads, key_dim, block_size] and values [blocks, kv heads, block_size,
    value_dim] of all blocks, in place."""
    layout, size = cache.layout, cache.block_size
    num_keys = layout.num_heads * layout.key_dim * size
    num_values = layout.num_heads * layout.value_dim * size
    own = cache.pool[:, cache.offset + 2 * _SCALE_BYTES * cache.num_scales :]
    keys_BnDL = own[:, :num_keys].view(len(own), layout.num_heads, layout.key_dim, size)
    shape = (len(own), layout.num_heads, size, layout.value_dim)
    return keys_BnDL, own[:, num_keys : num_keys + num_values].view(shape)


def _scales(cache: KvCache) -> tuple[Tensor, Tensor]:
    """Factors of keys and of values of all blocks, in place, [blocks, kv heads, block_size]."""
    first, count = cache.offset // _SCALE_BYTES, cache.num_scales
    own = cache.pool.view(torch.float32)[:, first : first + 2 * count]
    shape = (len(own), cache.layout.num_heads, cache.block_size)
    return own[:, :count].view(shape), own[:, count:].view(shape)


def _gather(cache: KvCache, blocks: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of some blocks, [kv heads, L, D]."""
    keys_BnDL, values_BnLD = (part[blocks] for part in _views(cache))
    if cache.is_int8:
        key_scales_BnL, value_scales_BnL = (part[blocks] for part in _scales(cache))
        keys_BnDL = keys_BnDL.float() * key_scales_BnL[:, :, None]
        values_BnLD = values_BnLD.float() * value_scales_BnL[..., None]
    k_nLD = keys_BnDL.permute(1, 0, 3, 2).flatten(1, 2)
    if cache.layout.value_dim == 0:
        return k_nLD, k_nLD[..., : options.value_dim]
    return k_nLD, values_BnLD.transpose(0, 1).flatten(1, 2)


def _check_rows(name: str, rows_TnD: Tensor, cache: KvCache, expected: tuple[int, int]) -> None:
    if rows_TnD.dtype != cache.dtype:
        raise ValueError(f"the pool is {cache.dtype}, expected {rows_TnD.dtype} as the rows")
    if cache.is_int8 and rows_TnD.device.type == "cuda":
        raise ValueError("the pool is int8, which is for the CPU alone")
    if rows_TnD.shape[1:] != expected:
        raise ValueError(
            f"{name} have shape {tuple(rows_TnD.shape)}, expected [T, {expected[0]}, {expected[1]}]"
        )


def _check_queries(q_TnD: Tensor, cache: KvCache, options: AttentionOptions) -> None:
    layout, num_heads = cache.layout, q_TnD.shape[1]
    _check_rows("queries", q_TnD, cache, (num_heads, layout.key_dim))
    if num_heads % layout.num_heads:
        raise ValueError(f"{num_heads} query heads do not share {layout.num_heads} key heads")
    possible = layout.value_dim or min(options.value_dim, layout.key_dim)
    if options.value_dim != possible:
        raise ValueError(f"value_dim is {options.value_dim}, the cache holds {possible}")
    if options.sinks_n is not None and options.sinks_n.shape != (num_heads,):
        raise ValueError(f"sinks have shape {tuple(options.sinks_n.shape)}, expected {num_heads}")
