"""Attention over paged keys and values. T rows, n query heads, D head size, S sequences, B blocks.

All layers share one pool of equal blocks, and a layer has the same part of every block that it
uses. What lies where inside that part is private to this module (`expertmesh_kernels.cpu.pages`).
Whole blocks may be copied; positions inside a block may not.
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
from expertmesh_kernels.cpu.pages import Pages
from expertmesh_kernels.cpu.pages import write_kv as cpu_write_kv
from expertmesh_kernels.host import as_array, as_input, row_stride

_UNLIMITED = 1 << 40
_NO_SINKS = np.empty(0, np.float32)
_TILES = np.empty(0, np.uint32)
_CHAINS = np.empty(0, np.float32)


@dataclass(frozen=True)
class KvCache:
    """One layer's keys and values inside the pool.

    Raises:
        ValueError: The layer's part does not lie within a block, or the pool has gaps.
    """

    pool: Tensor
    """[num_blocks, block_elements], of the model's dtype; shared by all layers."""
    offset: int
    """Elements from the start of a block to the layer's keys; its values follow them."""
    layout: KvLayout
    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
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
    def elements(self) -> int:
        """Elements of a block that are this layer's."""
        return self.layout.width * self.block_size

    @cached_property
    def pages(self) -> NDArray[np.int64]:
        """Where keys and values are: the fields of `Pages`, as CPU kernels take them."""
        layout = self.layout
        num_keys = layout.num_heads * layout.key_dim * self.block_size
        fields = Pages(
            address=self.pool.data_ptr(),
            size=self.pool.numel(),
            block_stride=self.pool.shape[1],
            keys_at=self.offset,
            values_at=self.offset + num_keys,
            num_heads=layout.num_heads,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            block_size=self.block_size,
        )
        return np.array(fields, np.int64)

    @cached_property
    def like(self) -> NDArray[np.generic]:
        """An empty array of the type that CPU kernels see in the pool."""
        return as_array(self.pool.new_empty(0))

    @cached_property
    def form(self) -> NDArray[np.generic]:
        """An empty array of the type of the panels that CPU kernels multiply."""
        return _TILES if self.pool.dtype == torch.bfloat16 and has_amx() else _CHAINS


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
        k_TnD: Keys, of the pool's dtype; may be a column slice of a larger tensor.
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
    keys_BnDL[blocks_T, :, :, offsets_T] = k_TnD
    values_BnLD[blocks_T, :, offsets_T] = v_TnD


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
    own = cache.pool[:, cache.offset : cache.offset + cache.elements]
    keys_BnDL = own[:, :num_keys].view(len(own), layout.num_heads, layout.key_dim, size)
    shape = (len(own), layout.num_heads, size, layout.value_dim)
    return keys_BnDL, own[:, num_keys:].view(shape)


def _gather(cache: KvCache, blocks: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of some blocks, [kv heads, L, D]."""
    keys_BnDL, values_BnLD = _views(cache)
    k_nLD = keys_BnDL[blocks].permute(1, 0, 3, 2).flatten(1, 2)
    if cache.layout.value_dim == 0:
        return k_nLD, k_nLD[..., : options.value_dim]
    return k_nLD, values_BnLD[blocks].transpose(0, 1).flatten(1, 2)


def _check_rows(name: str, rows_TnD: Tensor, cache: KvCache, expected: tuple[int, int]) -> None:
    if rows_TnD.dtype != cache.pool.dtype:
        raise ValueError(f"the pool is {cache.pool.dtype}, expected {rows_TnD.dtype} as the rows")
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
