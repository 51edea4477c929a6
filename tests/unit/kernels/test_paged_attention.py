"""Paged attention against the reference, with poisoned blocks, and its invariance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    write_kv,
    write_kv_reference,
)

LENGTHS = [70, 1, 130, 33]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(9, 3, 64, 16), (4, 2, 8, 4), (8, 1, 80, 16), (2, 2, 128, 32), (32, 1, 24, 24)]


@dataclass
class Case:
    """Caches filled with NaN but for the sequences, and a query for every position."""

    q_TnD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: NDArray[np.int32]
    sequence_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]

    def run(self, rows: NDArray[np.int64], window: int | None) -> Tensor:
        """Attention of the given rows."""
        return paged_attention(
            self.q_TnD[torch.from_numpy(rows)],
            self.k_cache,
            self.v_cache,
            self.tables,
            self.sequence_T[rows],
            self.positions_T[rows],
            scale=0.3,
            sliding_window=window,
        )


def make_case(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Case:
    """Sequences of `LENGTHS` in scattered blocks; unused table entries are out of range."""
    heads, kv_heads, head_dim, block_size = shape
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in LENGTHS]
    order = rng.permutation(sum(num_blocks) + 3)
    tables = np.full((len(LENGTHS), max(num_blocks)), 2**31 - 1, np.int32)
    k_cache = torch.full((len(order), kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    used = 0
    for sequence, length in enumerate(LENGTHS):
        tables[sequence, : num_blocks[sequence]] = order[used : used + num_blocks[sequence]]
        used += num_blocks[sequence]
        at = np.arange(length)
        slots = tables[sequence, at // block_size].astype(np.int64) * block_size + at % block_size
        fused = torch.randn(length, 2 * kv_heads * head_dim, generator=generator).to(dtype)
        k_TnD, v_TnD = (part.unflatten(1, (kv_heads, head_dim)) for part in fused.chunk(2, dim=1))
        write_kv(k_TnD, v_TnD, k_cache, v_cache, slots)
    positions = np.concatenate([np.arange(length) for length in LENGTHS]).astype(np.int32)
    sequences = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32)
    q_TnD = torch.randn(len(positions), heads, head_dim, generator=generator).to(dtype)
    return Case(q_TnD, k_cache, v_cache, tables, sequences, positions)


@pytest.mark.parametrize("window", [None, 1, 20, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    """Any head count, head size and block size, with and without a window; NaN elsewhere."""
    case = make_case(shape, dtype)
    actual = case.run(np.arange(sum(LENGTHS)), window)
    expected = paged_attention_reference(
        case.q_TnD,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.sequence_T,
        case.positions_T,
        scale=0.3,
        sliding_window=window,
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_any_order(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    """Decode, prefill chunks of any size and shuffled batches agree bit by bit."""
    case = make_case(shape, dtype)
    rows = np.arange(sum(LENGTHS))
    together = case.run(rows, window)
    order = np.random.default_rng(1).permutation(rows)
    assert torch.equal(together[torch.from_numpy(order)], case.run(order, window))
    for size in (1, 5, 16):
        chunks = [case.run(rows[i : i + size], window) for i in range(0, len(rows), size)]
        assert torch.equal(together, torch.cat(chunks))


def test_a_later_key_that_is_nan_does_not_reach_earlier_rows() -> None:
    """Rows that share loads with a poisoned later position keep their bits."""
    case = make_case(SHAPES[0], torch.float32)
    rows = np.arange(60, 70)
    before = case.run(rows, None)
    slot = int(case.tables[0, 69 // 16]) * 16 + 69 % 16
    poison = torch.full((1, 3, 64), torch.nan)
    write_kv(poison, poison, case.k_cache, case.v_cache, np.array([slot]))
    after = case.run(rows, None)
    assert torch.equal(before[:9], after[:9])
    assert bool(after[9].isnan().all())


def test_write_matches_the_reference() -> None:
    """Both writers leave the same caches, so they may be mixed."""
    generator = torch.Generator().manual_seed(0)
    k_TnD, v_TnD = torch.randn(2, 5, 2, 8, generator=generator).bfloat16()
    ours = torch.zeros(2, 3, 2, 4, 8, dtype=torch.bfloat16)
    reference = ours.clone()
    slots = np.array([11, 0, 5, 6, 3])
    write_kv(k_TnD, v_TnD, ours[0], ours[1], slots)
    write_kv_reference(k_TnD, v_TnD, reference[0], reference[1], slots)
    assert torch.equal(reference, ours)


def test_cache_of_another_dtype_is_refused() -> None:
    """Rows and caches must have one dtype."""
    cache = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"cache is torch.float32, expected torch.bfloat16"):
        write_kv(*torch.zeros(2, 1, 1, 8).bfloat16(), cache, cache.clone(), np.array([0]))
