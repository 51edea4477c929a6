"""Paged attention against the reference, with poisoned blocks, and its invariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.paged_attention import (
    AttentionOptions,
    Int8KvLayout,
    KvCache,
    paged_attention,
    paged_attention_reference,
    write_kv,
    write_kv_reference,
)

LENGTHS = [70, 1, 130, 33]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Shape:
    """Query heads, what a cache holds, and how wide an output is."""

    num_heads: int
    layout: KvLayout
    block_size: int
    value_dim: int


def _same(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> Shape:
    layout = KvLayout(num_kv_heads, head_dim, head_dim)
    return Shape(num_heads, layout, block_size, head_dim)


SHAPES = {
    "64": _same(9, 3, 64, 16),
    "8": _same(4, 2, 8, 4),
    "80": _same(8, 1, 80, 16),
    "128": _same(2, 2, 128, 32),
    "many heads": _same(32, 1, 24, 24),
    "narrow values": Shape(4, KvLayout(2, 96, 64), 16, 64),
    "wide values": Shape(4, KvLayout(2, 24, 72), 16, 72),
    "latent": Shape(5, KvLayout(1, 80, 0), 16, 72),
    "latent, many heads": Shape(32, KvLayout(1, 144, 0), 8, 128),
}


@dataclass
class Case:
    """A pool full of NaN but for the sequences' keys and values, and a query per position."""

    q_TnD: Tensor
    cache: KvCache
    tables: NDArray[np.int32]
    sequence_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    options: AttentionOptions

    def run(self, rows: NDArray[np.int64]) -> Tensor:
        """Attention of the given rows."""
        q_TnD = self.q_TnD[torch.from_numpy(rows)]
        where = (self.tables, self.sequence_T[rows], self.positions_T[rows])
        return paged_attention(q_TnD, self.cache, *where, self.options)

    def reference(self) -> Tensor:
        """Attention of all rows, in PyTorch."""
        where = (self.tables, self.sequence_T, self.positions_T)
        return paged_attention_reference(self.q_TnD, self.cache, *where, self.options)


def make_case(
    name: str,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    *,
    sinks: bool = False,
    int8: bool = False,
) -> Case:
    """Sequences of `LENGTHS` in scattered blocks; table entries after them are out of range."""
    shape = SHAPES[name]
    layout, block_size = shape.layout, shape.block_size
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in LENGTHS]
    order = rng.permutation(sum(num_blocks) + 3)
    tables = np.full((len(LENGTHS), max(num_blocks)), 2**31 - 1, np.int32)
    cache = poisoned_cache(len(order), layout, block_size, dtype, int8=int8)
    used = 0
    for sequence, length in enumerate(LENGTHS):
        tables[sequence, : num_blocks[sequence]] = order[used : used + num_blocks[sequence]]
        used += num_blocks[sequence]
        at = np.arange(length)
        slots = tables[sequence, at // block_size].astype(np.int64) * block_size + at % block_size
        fused = torch.randn(length, layout.width, generator=generator).to(dtype)
        k_TnD, v_TnD = heads_of(fused, layout)
        write_kv(k_TnD, v_TnD, cache, slots)
    positions = np.concatenate([np.arange(length) for length in LENGTHS]).astype(np.int32)
    sequences = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32)
    q_shape = (len(positions), shape.num_heads, layout.key_dim)
    q_TnD = torch.randn(*q_shape, generator=generator).to(dtype)
    sinks_n = torch.randn(shape.num_heads, generator=generator) * 3 if sinks else None
    options = AttentionOptions(0.3, shape.value_dim, window, softcap, sinks_n)
    return Case(q_TnD, cache, tables, sequences, positions, options)


def poisoned_cache(
    num_blocks: int, layout: KvLayout, block_size: int, dtype: torch.dtype, *, int8: bool
) -> KvCache:
    """Blocks full of NaN; of int8, bytes that are NaN as a factor."""
    if int8:
        held = Int8KvLayout(layout.num_heads, layout.key_dim, layout.value_dim)
        bytes_BW = torch.full((num_blocks, held.width * block_size + 12), -1, dtype=torch.int8)
        return KvCache(bytes_BW, 8, held, block_size, dtype)
    pool = torch.full((num_blocks, layout.width * block_size + 11), torch.nan, dtype=dtype)
    return KvCache(pool, 7, layout, block_size)


def heads_of(fused_TW: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    """Keys and values as column slices of one tensor."""
    num_keys = layout.num_heads * layout.key_dim
    k_TnD = fused_TW[:, :num_keys].unflatten(1, (layout.num_heads, layout.key_dim))
    v_TnD = fused_TW[:, num_keys:].unflatten(1, (layout.num_heads, layout.value_dim))
    return k_TnD, v_TnD


def check_same_bits(case: Case) -> None:
    """Rows together, in another order, alone and in chunks."""
    rows = np.arange(sum(LENGTHS))
    together = case.run(rows)
    order = np.random.default_rng(1).permutation(rows)
    assert torch.equal(together[torch.from_numpy(order)], case.run(order))
    for size in (1, 5, 16):
        chunks = [case.run(rows[i : i + size]) for i in range(0, len(rows), size)]
        assert torch.equal(together, torch.cat(chunks))


def check_reference(case: Case) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    limit = tolerance[case.q_TnD.dtype]
    actual = case.run(np.arange(sum(LENGTHS)))
    torch.testing.assert_close(actual, case.reference(), rtol=limit, atol=limit)


@pytest.mark.parametrize("window", [None, 1, 20, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["64", "8", "80"])
def test_matches_the_reference(name: str, dtype: torch.dtype, window: int | None) -> None:
    """With and without a window; NaN elsewhere."""
    check_reference(make_case(name, dtype, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_with_all_options_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    """Any head count, head size and block size, values narrower or wider than keys, latents."""
    check_reference(make_case(name, dtype))
    check_reference(make_case(name, dtype, 50, softcap=1.5, sinks=True))


@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["64", "80", "narrow values", "latent"])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_any_order(
    name: str, dtype: torch.dtype, window: int | None
) -> None:
    """Decode, prefill chunks of any size and shuffled batches agree bit by bit."""
    check_same_bits(make_case(name, dtype, window, softcap=5.0, sinks=True))


@pytest.mark.parametrize("name", ["64", "latent"])
def test_block_size_and_place_in_the_pool_change_no_bit(name: str) -> None:
    """The same tokens in blocks of 4 at the start of a block, and of 32 behind other layers."""
    shape, outputs = SHAPES[name], []
    generator = torch.Generator().manual_seed(0)
    fused_TW = torch.randn(90, shape.layout.width, generator=generator)
    q_TnD = torch.randn(1, shape.num_heads, shape.layout.key_dim, generator=generator)
    for block_size, offset in ((4, 0), (32, 1000)):
        num_blocks = -(-90 // block_size)
        pool = torch.full((num_blocks, offset + shape.layout.width * block_size), torch.nan)
        cache = KvCache(pool, offset, shape.layout, block_size)
        write_kv(*heads_of(fused_TW, shape.layout), cache, np.arange(90))
        tables = np.arange(num_blocks, dtype=np.int32)[None]
        where = (tables, np.zeros(1, np.int32), np.full(1, 89, np.int32))
        options = AttentionOptions(0.3, shape.value_dim)
        outputs.append(paged_attention(q_TnD, cache, *where, options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["64", "latent"])
@pytest.mark.parametrize("window", [1, 20, 70])
def test_blocks_behind_the_window_may_hold_anything(name: str, window: int) -> None:
    """Their table entries point to a poisoned block: not one bit changes."""
    case = make_case(name, torch.bfloat16, window, softcap=5.0, sinks=True)
    rows = np.flatnonzero((case.sequence_T == 2) & (case.positions_T >= 100))
    before = case.run(rows)
    used = np.unique(np.concatenate([case.tables[s, : -(-n // 16)] for s, n in enumerate(LENGTHS)]))
    poisoned = np.setdiff1d(np.arange(len(case.cache.pool)), used)[0]
    first_visible = 100 + 1 - window
    case.tables[2, : first_visible // 16] = poisoned
    assert torch.equal(case.run(rows), before)
    pool = case.cache.pool
    pool[torch.from_numpy(np.setdiff1d(np.arange(len(pool)), case.tables[2]))] = torch.nan
    assert torch.equal(case.run(rows), before)
    assert bool(before.isfinite().all())


def test_a_large_sink_takes_all_the_weight() -> None:
    """The outputs vanish; a small sink changes nothing."""
    case = make_case("64", torch.float32)
    rows = np.arange(70)
    before = case.run(rows)
    case.options = replace(case.options, sinks_n=torch.full((9,), 200.0))
    assert not case.run(rows).any()
    case.options = replace(case.options, sinks_n=torch.full((9,), -200.0))
    assert torch.equal(case.run(rows), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_key_that_is_nan_does_not_reach_earlier_rows(dtype: torch.dtype) -> None:
    """Rows that share loads with a poisoned later position keep their bits."""
    case = make_case("64", dtype)
    rows = np.arange(60, 70)
    before = case.run(rows)
    slot = int(case.tables[0, 69 // 16]) * 16 + 69 % 16
    poison = torch.full((1, 3, 64), torch.nan, dtype=dtype)
    write_kv(poison, poison, case.cache, np.array([slot]))
    after = case.run(rows)
    assert torch.equal(before[:9], after[:9])
    assert bool(after[9].isnan().all())


@pytest.mark.parametrize("layout", [KvLayout(3, 8, 8), KvLayout(2, 8, 5), KvLayout(1, 8, 0)])
def test_write_matches_the_reference(layout: KvLayout) -> None:
    """Both writers leave the same pool, so they may be mixed; the rest of it stays."""
    fused_TW = torch.randn(5, layout.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    pools = torch.full((2, 3, layout.width * 4 + 9), 7.0, dtype=torch.bfloat16)
    slots = np.array([11, 0, 5, 6, 3])
    for pool, write in zip(pools, (write_kv, write_kv_reference), strict=True):
        write(*heads_of(fused_TW, layout), KvCache(pool, 4, layout, 4), slots)
    assert torch.equal(*pools)
    assert int((pools[0] != 7.0).sum()) == 5 * layout.width


def test_what_does_not_fit_is_refused() -> None:
    """The message has what is wrong and what was expected."""
    layout = KvLayout(1, 8, 8)
    cache = KvCache(torch.zeros(1, 64), 0, layout, 4)
    sinks = AttentionOptions(1.0, 8, sinks_n=torch.zeros(2))
    none, rows = np.zeros((1, 1), np.int32), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=r"pool is torch.float32, expected torch.bfloat16"):
        write_kv(rows.bfloat16(), rows.bfloat16(), cache, np.array([0]))
    with pytest.raises(ValueError, match=r"values have shape \(1, 1, 4\), expected \[T, 1, 8\]"):
        write_kv(rows, rows[..., :4], cache, np.array([0]))
    with pytest.raises(ValueError, match=r"value_dim is 9, the cache holds 8"):
        paged_attention(rows, cache, none, none[0], none[0], AttentionOptions(1.0, 9))
    with pytest.raises(ValueError, match=r"sinks have shape \(2,\), expected 1"):
        paged_attention(rows, cache, none, none[0], none[0], sinks)
    with pytest.raises(ValueError, match=r"elements 1 to 65 of a block are not within its 64"):
        KvCache(torch.zeros(1, 64), 1, layout, 4)
    with pytest.raises(ValueError, match=r"expected contiguous \[num_blocks, block_elements\]"):
        KvCache(torch.zeros(64, 4).T, 0, layout, 4)
