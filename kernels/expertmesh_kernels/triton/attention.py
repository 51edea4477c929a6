"""Paged attention on CUDA devices. T rows, n query heads, D head size, S sequences, B blocks.

One kernel for prefill and decode. A program takes a run of rows of one sequence and some query
heads that share a key head, all in all up to 16 or 32 query vectors. It walks over the keys in
splits of `SPLIT` and inside these in tiles, all at absolute multiples. Each split begins an online
softmax of its own; its maximum, sum and weighted values are then merged into the row's, in
ascending order. Few rows with long contexts would leave the device idle, so there each split is a
program of its own, and a second kernel merges, with the same operations. What a row does not see
changes nothing: factors are exactly 0 or 1. So a row's bits depend on the row alone, and not on the
tile, the grid or the chunk that it is in. Sums over keys are matrix products too, with ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import device, dot, kernel, narrow, next_power, tanh
from expertmesh_kernels.triton.kv import DevicePages

SPLIT = 512
"""Keys of a split."""
_FEW, _MANY = 16, 32
"""Query vectors of a tile. Below 64, so that all use the same matrix instruction (see `tiles`)."""
_BUSY = 512
"""Programs from which on splits need none of their own."""
_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class RowTiles:
    """Runs of rows, at successive positions of one sequence, that programs take together."""

    first_row: Tensor
    """int32 [tiles]."""
    num_rows: Tensor
    """int32 [tiles]; 0 for tiles that are padding."""
    max_rows: int
    """What `rows_per_tile` says."""


@dataclass(frozen=True)
class Scores:
    """What a layer does with scores."""

    scale: float
    value_dim: int
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_n: Tensor | None = None
    """float32 [n]."""


def rows_per_tile(group: int, *, prefill: bool) -> int:
    """Rows of a tile, for `group` query heads per key head. Bits do not depend on it."""
    return max((_MANY if prefill else _FEW) // group, 1)


@device
def _exp(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """exp(x - top); 0 where x is -inf, also if top is."""
    return tl.exp(x - tl.where(top == float("-inf"), 0.0, top))


@device
def _load_part(
    ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, mask: tl.tensor,
    num_columns: tl.tensor, stride: tl.tensor,
) -> tl.tensor:  # fmt: skip
    mask = mask[:, None] & (columns < num_columns)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0)


@device
def _finish(top: tl.tensor, total: tl.tensor, acc: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Weighted values over the sum, with a sink's logit, which may be -inf."""
    new_top = tl.maximum(top, sink)
    old = _exp(top, new_top)
    return acc * (old / (total * old + _exp(sink, new_top)))[:, None]


@kernel("table_stride", "q_row", "num_splits")
def _attend(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first_rows_ptr: tl.tensor,
    tile_rows_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    num_splits: tl.tensor,
    block_stride: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    block_size: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LATENT: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Some query vectors over all splits, or PARTIAL: over one split, for `_merge`.

    What a row has of split s lies at place s modulo the number of splits that it can see.
    """
    tile = tl.program_id(0)
    tile_rows = tl.load(tile_rows_ptr + tile)
    if tile_rows == 0:
        return
    group = num_heads // num_kv_heads
    parts = (group + HEADS - 1) // HEADS
    kv_head, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    queries = tl.arange(0, QUERIES)
    first_row = tl.load(first_rows_ptr + tile)
    rows = first_row + queries // HEADS
    head_in_group = part * HEADS + queries % HEADS
    is_query = (queries // HEADS < tile_rows) & (head_in_group < group)
    heads = kv_head * group + head_in_group
    first = tl.load(positions_ptr + first_row)
    positions = first + queries // HEADS
    end = first + tile_rows
    starts = tl.maximum(positions - window + 1, 0)
    start = tl.maximum(first - window + 1, 0)
    sequence = tl.load(sequences_ptr + first_row).to(tl.int64)

    d, rest, v_columns = (
        tl.arange(0, DIM),
        tl.arange(0, REST if REST > 0 else 16),
        tl.arange(0, VALUES),
    )
    q_ptrs = q_ptr + rows.to(tl.int64) * q_row + heads * key_dim
    q = tl.load(
        q_ptrs[:, None] + d[None, :], mask=is_query[:, None] & (d < key_dim)[None, :], other=0
    )
    if REST > 0:
        mask = is_query[:, None] & (DIM + rest < key_dim)[None, :]
        q_rest = tl.load(q_ptrs[:, None] + DIM + rest[None, :], mask=mask, other=0)
    ones = narrow(tl.full([KEYS, 16], 1.0, tl.float32), q.dtype)
    keys_at += kv_head * key_dim * block_size
    values_at += kv_head * value_dim * block_size

    all_top = tl.full([QUERIES], float("-inf"), tl.float32)
    all_total = tl.zeros([QUERIES], tl.float32)
    all_acc = tl.zeros([QUERIES, VALUES], tl.float32)
    first_split, last_split = start // SPLIT, (end + SPLIT - 1) // SPLIT
    if PARTIAL:
        first_split += tl.program_id(2)
        last_split = tl.minimum(first_split + 1, last_split)
    for split in range(first_split, last_split):
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        totals = tl.zeros([QUERIES, 16], tl.float32)
        acc = tl.zeros([QUERIES, VALUES], tl.float32)
        low = tl.maximum(split * SPLIT, start // KEYS * KEYS)
        for begin in range(low, tl.minimum((split + 1) * SPLIT, end), KEYS):
            j = begin + tl.arange(0, KEYS)
            is_key = (j >= start) & (j < end)
            table_ptr = tables_ptr + sequence * table_stride
            block = tl.load(table_ptr + j // block_size, mask=is_key, other=0).to(tl.int64)
            key_ptrs = pool_ptr + block * block_stride + keys_at + j % block_size
            k_mask = is_key[None, :] & (d < key_dim)[:, None]
            k = tl.load(key_ptrs[None, :] + d[:, None] * block_size, mask=k_mask, other=0)
            scores = dot(q, k.to(q.dtype), tl.zeros([QUERIES, KEYS], tl.float32))
            if REST > 0:
                rest_mask = is_key[None, :] & (DIM + rest < key_dim)[:, None]
                at = (DIM + rest)[:, None] * block_size
                k_rest = tl.load(key_ptrs[None, :] + at, mask=rest_mask, other=0)
                scores = dot(q_rest, k_rest.to(q.dtype), scores)
            scores *= scale
            if QUANTIZED:
                slots = (block * block_size + j % block_size) * num_kv_heads + kv_head
                scores *= tl.load(key_scales_ptr + slots, mask=is_key, other=0)[None, :]
            if HAS_SOFTCAP:
                scores = softcap * tanh(scores / softcap)
            sees = (j[None, :] >= starts[:, None]) & (j[None, :] <= positions[:, None])
            scores = tl.where(sees, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            old = _exp(top, new_top)
            weights = _exp(scores, new_top[:, None])
            totals = dot(narrow(weights, q.dtype), ones, totals * old[:, None])
            v_mask = is_key[:, None] & (v_columns < value_dim)[None, :]
            if LATENT:
                v = tl.load(
                    key_ptrs[:, None] + v_columns[None, :] * block_size, mask=v_mask, other=0
                )
            else:
                value_ptrs = (
                    pool_ptr + block * block_stride + values_at + j % block_size * value_dim
                )
                v = tl.load(value_ptrs[:, None] + v_columns[None, :], mask=v_mask, other=0)
            if QUANTIZED:
                factors = tl.load(value_scales_ptr + slots, mask=is_key, other=0)
                weights *= factors[None, :]
            acc = dot(narrow(weights, q.dtype), v.to(q.dtype), acc * old[:, None])
            top = new_top
        total = tl.max(totals, 1)  # all columns are equal
        new_top = tl.maximum(all_top, top)
        old, new = _exp(all_top, new_top), _exp(top, new_top)
        all_total = all_total * old + total * new
        all_acc = all_acc * old[:, None] + acc * new[:, None]
        all_top = new_top

    place = rows.to(tl.int64) * num_heads + heads
    mask = is_query[:, None] & (v_columns < value_dim)[None, :]
    if PARTIAL:
        place = place * num_splits + first_split % num_splits
        tl.store(tops_ptr + place, all_top, mask=is_query)
        tl.store(totals_ptr + place, all_total, mask=is_query)
    else:
        sink = tl.full([QUERIES], float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads, mask=is_query, other=0)
        all_acc = _finish(all_top, all_total, all_acc, sink)
    result = narrow(all_acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * value_dim + v_columns[None, :], result, mask=mask)


@kernel("num_splits")
def _merge(
    parts_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    num_heads: tl.tensor,
    value_dim: tl.tensor,
    window: tl.tensor,
    HAS_SINKS: tl.constexpr,
    VALUES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """The splits of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    columns = tl.arange(0, VALUES)
    first_split = tl.maximum(position - window + 1, 0) // SPLIT
    all_top = tl.full([1], float("-inf"), tl.float32)
    all_total = tl.zeros([1], tl.float32)
    all_acc = tl.zeros([1, VALUES], tl.float32)
    for split in range(first_split, position // SPLIT + 1):
        place = (row * num_heads + head) * num_splits + split % num_splits + tl.arange(0, 1)
        top, total = tl.load(tops_ptr + place), tl.load(totals_ptr + place)
        at = place[:, None] * value_dim + columns[None, :]
        acc = tl.load(parts_ptr + at, mask=(columns < value_dim)[None, :], other=0)
        new_top = tl.maximum(all_top, top)
        old, new = _exp(all_top, new_top), _exp(top, new_top)
        all_total = all_total * old + total * new
        all_acc = all_acc * old[:, None] + acc * new[:, None]
        all_top = new_top
    sink = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head + tl.arange(0, 1))
    result = narrow(_finish(all_top, all_total, all_acc, sink), out_ptr.dtype.element_ty)
    at = (row * num_heads + head) * value_dim + columns[None, :]
    tl.store(out_ptr + at, result, mask=(columns < value_dim)[None, :])


def paged_attention(
    q_TnD: Tensor,
    pages: DevicePages,
    block_tables_SB: Tensor,
    sequence_of_row_T: Tensor,
    positions_T: Tensor,
    tiles: RowTiles,
    scores: Scores,
    max_len: int,
) -> Tensor:
    """See `expertmesh_kernels.paged_attention.paged_attention`; [T, n, value_dim].

    Args:
        q_TnD: Rows are contiguous.
        pages: Where the keys and values that a row sees are written.
        block_tables_SB: int32, rows are contiguous.
        sequence_of_row_T: int32.
        positions_T: int32.
        tiles: Which rows programs take; each row is in one tile, or is padding and left undefined.
        scores: What is done with the scores.
        max_len: More than any position: a bound for the grid.
    """
    num_rows, num_heads, key_dim = q_TnD.shape
    layout, value_dim = pages.layout, scores.value_dim
    out_TnD = q_TnD.new_empty(num_rows, num_heads, value_dim)
    if not num_rows:
        return out_TnD
    group = num_heads // layout.num_heads
    queries = _MANY if tiles.max_rows * group > _FEW and group <= _MANY else _FEW
    heads = min(group, queries)
    programs = len(tiles.first_row) * layout.num_heads * -(-group // heads)
    seen = min(max_len, (scores.sliding_window or _UNLIMITED) + SPLIT + tiles.max_rows)
    num_splits = -(-seen // SPLIT)
    is_partial = num_splits > 1 and programs < _BUSY
    out, tops, totals = out_TnD, out_TnD, out_TnD
    if is_partial:
        shape = (num_rows, num_heads, num_splits)
        out = q_TnD.new_empty(*shape, value_dim, dtype=torch.float32)
        tops, totals = (q_TnD.new_empty(shape, dtype=torch.float32) for _ in range(2))
    dim = 1 << (key_dim.bit_length() - 1)
    rest = next_power(key_dim - dim) if key_dim > dim else 0
    key_scales = pages.pool if pages.key_scales is None else pages.key_scales
    sinks = out if scores.sinks_n is None else scores.sinks_n
    window = scores.sliding_window or _UNLIMITED
    values = max(next_power(value_dim), 16)
    keys = 64 if max(dim, values) <= 64 else 32 if max(dim, values) <= 256 else 16
    programs_2d = (len(tiles.first_row), layout.num_heads * -(-group // heads))
    _attend[(*programs_2d, num_splits if is_partial else 1)](
        q_TnD, pages.pool, key_scales,
        key_scales if pages.value_scales is None else pages.value_scales,
        block_tables_SB, sequence_of_row_T, positions_T, tiles.first_row, tiles.num_rows, sinks,
        out, tops, totals, block_tables_SB.stride(0), q_TnD.stride(0), num_splits,
        pages.pool.shape[1], pages.keys_at, pages.values_at, num_heads, layout.num_heads,
        pages.block_size, key_dim, value_dim, window, float(scores.scale),
        float(scores.softcap or 1.0),
        HAS_SOFTCAP=scores.softcap is not None, HAS_SINKS=scores.sinks_n is not None,
        QUANTIZED=pages.key_scales is not None, LATENT=layout.value_dim == 0,
        PARTIAL=is_partial, HEADS=heads, QUERIES=queries, KEYS=keys, DIM=max(dim, 16),
        REST=max(rest, 16) if rest else 0, VALUES=values, SPLIT=SPLIT,
        num_warps=8 if values >= 256 else 4, num_stages=2,
    )  # fmt: skip
    if is_partial:
        _merge[(num_rows, num_heads)](
            out, tops, totals, positions_T, sinks, out_TnD, num_splits, num_heads, value_dim,
            window, HAS_SINKS=scores.sinks_n is not None, VALUES=values, SPLIT=SPLIT,
            num_warps=1,
        )  # fmt: skip
    return out_TnD
