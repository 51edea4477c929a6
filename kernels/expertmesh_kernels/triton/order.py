"""Pairs in the order of their experts, on CUDA devices. N (token, expert) pairs, E experts.

A counting sort without atomics, so the order is the same in every run: one program an expert counts
its pairs, then one an expert writes them, in ascending order, where the earlier experts' end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import kernel, next_power

_CHUNK = 1024


@dataclass(frozen=True)
class Order:
    """Pairs by expert. Each expert's begin with a block of `block_m`, whose rest is padding."""

    pairs: Tensor
    """int32 [blocks * block_m]: pairs; N stands for padding."""
    expert_of_block: Tensor
    """int32 [blocks]: -1 for blocks of padding alone, which come last."""
    counts_E: Tensor
    """int32: pairs of each expert."""


@kernel("num_pairs")
def _count(
    experts_ptr: tl.tensor, counts_ptr: tl.tensor, num_pairs: tl.tensor, CHUNK: tl.constexpr
) -> None:
    expert = tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        own = tl.load(experts_ptr + at, mask=at < num_pairs, other=-1) == expert
        count += own.to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@kernel("num_pairs", "num_blocks")
def _place(
    experts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    expert_of_block_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the blocks of an expert; the last program writes those that are padding alone."""
    expert = tl.program_id(0)
    ids = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + ids, mask=ids < num_experts, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(ids < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(ids == expert, blocks, 0), 0)
    own_id = expert
    if expert == num_experts:
        own_blocks = num_blocks - first_block
        own_id = -1
    lanes = tl.arange(0, CHUNK)
    base = first_block * BLOCK_M
    written = tl.full([], 0, tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + lanes
        own = tl.load(experts_ptr + at, mask=at < num_pairs, other=-1) == expert
        rank = tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + base + written + rank, at, mask=own & (at < num_pairs))
        written += tl.sum(own.to(tl.int32), 0)
    for start in range(written, own_blocks * BLOCK_M, CHUNK):
        at = start + lanes
        padding = tl.zeros([CHUNK], tl.int32) + num_pairs
        tl.store(pairs_ptr + base + at, padding, mask=at < own_blocks * BLOCK_M)
    for start in range(0, own_blocks, CHUNK):
        at = start + lanes
        own_ids = tl.zeros([CHUNK], tl.int32) + own_id
        tl.store(expert_of_block_ptr + first_block + at, own_ids, mask=at < own_blocks)


def order_by_expert(
    expert_of_pair_N: Tensor, num_experts: int, block_m: int, counts_E: Tensor | None = None
) -> Order:
    """Sort pairs by expert, in ascending order within each.

    Args:
        expert_of_pair_N: int32, contiguous. Pairs of other numbers than 0 to `num_experts` - 1
            belong to nobody and are left out.
        num_experts: E.
        block_m: Pairs of a block; 1 for no padding in between.
        counts_E: int32: pairs of each expert, if the router counted them.
    """
    num_pairs = expert_of_pair_N.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_m)
    order = Order(
        expert_of_pair_N.new_empty(num_blocks * block_m),
        expert_of_pair_N.new_empty(num_blocks),
        expert_of_pair_N.new_empty(num_experts) if counts_E is None else counts_E,
    )
    if counts_E is None:
        _count[(num_experts,)](expert_of_pair_N, order.counts_E, num_pairs, CHUNK=_CHUNK)
    _place[(num_experts + 1,)](
        expert_of_pair_N, order.counts_E, order.pairs, order.expert_of_block, num_pairs,
        num_blocks, num_experts, EXPERTS=next_power(num_experts), BLOCK_M=block_m, CHUNK=_CHUNK,
    )  # fmt: skip
    return order


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks for the worst distribution: every expert that can have pairs has one of them alone."""
    busy = min(num_pairs, num_experts)
    return busy + (num_pairs - busy) // block_m
