"""Attention over a paged cache. T rows, n query heads, D head size, S sequences, B blocks.

Caches have the shape [num_blocks, num_kv_heads, block_size, head_dim] and the model's dtype. What a
block holds is private to this module: values lie as the shape says, keys lie transposed,
[head_dim, block_size], so that scores of neighbouring keys fill a vector. Whole blocks may be
copied; positions inside a block may not.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.attention import paged_attention as cpu_paged_attention
from expertmesh_kernels.cpu.attention import write_kv as cpu_write_kv
from expertmesh_kernels.host import as_array, as_input, as_rows

_UNLIMITED = 1 << 40


def write_kv(
    k_TnD: Tensor, v_TnD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: NDArray[np.int64]
) -> None:
    """Store the keys and values of new tokens.

    Args:
        k_TnD: Keys, of the caches' dtype; may be a column slice of a larger tensor.
        v_TnD: Values, likewise.
        k_cache: See the module.
        v_cache: See the module.
        slots_T: block * block_size + offset of each row; rows are written in order.
    """
    _check_dtype(k_TnD, k_cache)
    if k_TnD.device.type != "cpu":
        write_kv_reference(k_TnD, v_TnD, k_cache, v_cache, slots_T)
        return
    k, k_stride = as_rows(k_TnD)
    v, v_stride = as_rows(v_TnD)
    slots_T = as_input(slots_T, np.int64)
    cpu_write_kv(k, k_stride, v, v_stride, _keys(k_cache), as_array(v_cache), slots_T)


def paged_attention(
    q_TnD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    *,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal grouped-query attention, [T, n, D], in the dtype of q.

    Rows may come in any order; runs of successive positions of one sequence are faster. FP32
    inside, rounded once.

    Args:
        q_TnD: Queries; may be a column slice of a larger tensor.
        k_cache: See the module; keys 0 .. position of each row are written.
        v_cache: See the module.
        block_tables_SB: Blocks of each sequence in order; entries beyond its length are ignored.
        sequence_of_row_T: Which row of `block_tables_SB` a row belongs to.
        positions_T: Position of each row in its sequence.
        scale: Factor of the scores.
        sliding_window: Keys that a row sees, itself included; None for all.
    """
    _check_dtype(q_TnD, k_cache)
    window = _UNLIMITED if sliding_window is None else sliding_window
    if q_TnD.device.type != "cpu":
        return paged_attention_reference(
            q_TnD, k_cache, v_cache, block_tables_SB, sequence_of_row_T, positions_T,
            scale=scale, sliding_window=sliding_window,
        )  # fmt: skip
    q, q_stride = as_rows(q_TnD)
    out_TnD = q_TnD.new_empty(q_TnD.shape)
    cpu_paged_attention(
        q, q_stride, _keys(k_cache), as_array(v_cache), as_input(block_tables_SB, np.int32),
        as_input(sequence_of_row_T, np.int32), as_input(positions_T, np.int32),
        np.float32(scale), window, as_array(out_TnD),
    )  # fmt: skip
    return out_TnD


def write_kv_reference(
    k_TnD: Tensor, v_TnD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: NDArray[np.int64]
) -> None:
    """What `write_kv` does, in PyTorch; for different slots."""
    block_size = k_cache.shape[2]
    slots = torch.from_numpy(np.array(slots_T)).to(k_cache.device)
    blocks_T, offsets_T = slots // block_size, slots % block_size
    _transposed(k_cache)[blocks_T, :, :, offsets_T] = k_TnD
    v_cache[blocks_T, :, offsets_T] = v_TnD


def paged_attention_reference(
    q_TnD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    *,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """What `paged_attention` computes, in PyTorch, row by row."""
    out_TnD = torch.empty(q_TnD.shape, dtype=q_TnD.dtype, device=q_TnD.device)
    group = q_TnD.shape[1] // k_cache.shape[1]
    for t, (sequence, position) in enumerate(zip(sequence_of_row_T, positions_T, strict=True)):
        end = int(position) + 1
        start = 0 if sliding_window is None else max(0, end - sliding_window)
        num_blocks = -(-end // k_cache.shape[2])
        blocks = torch.from_numpy(np.array(block_tables_SB[sequence, :num_blocks], np.int64))
        k_nDL = _transposed(k_cache)[blocks.to(k_cache.device)].permute(1, 2, 0, 3).flatten(2)
        v_nLD = v_cache[blocks.to(v_cache.device)].transpose(0, 1).flatten(1, 2)
        k_nDL = k_nDL[..., start:end].float().repeat_interleave(group, 0)
        v_nLD = v_nLD[:, start:end].float().repeat_interleave(group, 0)
        scores_n1L = q_TnD[t, :, None].float() @ k_nDL * scale
        out_TnD[t] = (scores_n1L.softmax(-1) @ v_nLD)[:, 0].to(q_TnD.dtype)
    return out_TnD


def _transposed(k_cache: Tensor) -> Tensor:
    """The key cache as its blocks are stored: [blocks, kv heads, head_dim, block_size]."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    return k_cache.view(num_blocks, num_kv_heads, head_dim, block_size)


def _keys(k_cache: Tensor) -> NDArray[np.generic]:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    return as_array(k_cache).reshape(num_blocks, num_kv_heads, head_dim, block_size)


def _check_dtype(tensor: Tensor, cache: Tensor) -> None:
    if tensor.dtype != cache.dtype:
        raise ValueError(f"cache is {cache.dtype}, expected {tensor.dtype} as the rows")
