"""Keys and values held as int8: against the reference, and against what they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.cpu.features import has_amx
from expertmesh_kernels.paged_attention import (
    AttentionOptions,
    Int8KvLayout,
    KvCache,
    paged_attention,
    write_kv,
    write_kv_reference,
)
from tests.unit.kernels.test_paged_attention import (
    DTYPES,
    LENGTHS,
    Case,
    check_reference,
    check_same_bits,
    heads_of,
    make_case,
    poisoned_cache,
)

SHAPES = ["64", "8", "80", "many heads", "narrow values", "wide values"]
ODD = KvLayout(3, 9, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    """Any shape, with and without all options; what is not written is NaN."""
    check_reference(make_case(name, dtype, int8=True))
    check_reference(make_case(name, dtype, 50, softcap=1.5, sinks=True, int8=True))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["64", "80", "narrow values"])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_any_order(
    name: str, dtype: torch.dtype, window: int | None
) -> None:
    """Decode, prefill chunks of any size and shuffled batches agree bit by bit."""
    check_same_bits(make_case(name, dtype, window, softcap=5.0, sinks=True, int8=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_what_the_codes_stand_for(name: str, dtype: torch.dtype) -> None:
    """Held plainly, in the type that products take: only writing loses anything."""
    if dtype == torch.bfloat16 and not has_amx():
        pytest.skip("products are in FP32 here, and take more than bfloat16 holds")
    case, plain = make_case(name, dtype, int8=True), make_case(name, dtype)
    rows = np.arange(sum(LENGTHS))
    _hold_plainly(case, plain.cache)
    assert torch.equal(case.run(rows), replace(case, cache=plain.cache).run(rows))


def _hold_plainly(case: Case, plain: KvCache) -> None:
    """Writes what codes stand for into a cache without codes."""
    codes, layout, size = case.cache, case.cache.layout, case.cache.block_size
    first, count = codes.offset // 4, layout.num_heads * size
    scales = codes.pool.view(torch.float32)[:, first : first + 2 * count].unflatten(
        1, (2, -1, size)
    )
    data = codes.pool[:, codes.offset + 8 * count :].float()
    num_keys = count * layout.key_dim
    keys = data[:, :num_keys].unflatten(1, (-1, layout.key_dim, size)) * scales[:, 0, :, None]
    values = data[:, num_keys : num_keys + count * layout.value_dim]
    values = values.unflatten(1, (-1, size, layout.value_dim)) * scales[:, 1, ..., None]
    k_TnD = keys.permute(0, 3, 1, 2).flatten(0, 1).to(plain.dtype)
    v_TnD = values.transpose(1, 2).flatten(0, 1).to(plain.dtype)
    write_kv_reference(k_TnD, v_TnD, plain, np.arange(len(k_TnD)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [KvLayout(3, 8, 8), ODD])
def test_write_matches_the_reference(layout: KvLayout, dtype: torch.dtype) -> None:
    """Codes, factors, and the rest of the pool; rows of zeros, of tiny, huge, NaN and infinite
    elements too."""
    fused_TW = torch.randn(7, layout.width, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate((0.0, 1e-30, torch.nan, torch.inf)):
        fused_TW[row, :11] = value
    fused_TW[4] *= 1e4
    caches = [poisoned_cache(3, layout, 4, dtype, int8=True) for _ in range(2)]
    slots = np.array([11, 0, 5, 6, 3, 1, 2])
    for cache, write in zip(caches, (write_kv, write_kv_reference), strict=True):
        write(*heads_of(fused_TW.to(dtype), layout), cache, slots)
    assert torch.equal(_bytes(caches[0]), _bytes(caches[1]))


def _bytes(cache: KvCache) -> Tensor:
    """With one kind of NaN."""
    words = cache.pool.view(torch.float32)
    return torch.where(words.isnan(), torch.nan, words).view(torch.int8)


def test_a_nan_stays_one() -> None:
    """A key that is not finite reaches all rows that see it, and no others."""
    case = make_case("64", torch.float32, int8=True)
    rows = np.arange(60, 70)
    before = case.run(rows)
    slot = int(case.tables[0, 69 // 16]) * 16 + 69 % 16
    poison = torch.full((1, 3, 64), torch.nan)
    write_kv(poison, poison, case.cache, np.array([slot]))
    after = case.run(rows)
    assert torch.equal(before[:9], after[:9])
    assert bool(after[9].isnan().all())


def test_half_of_a_percent_is_lost() -> None:
    """Outputs for random keys and values differ from plain ones by little."""
    exact, rough = (make_case("64", torch.float32, int8=int8) for int8 in (False, True))
    rows = np.arange(sum(LENGTHS))
    difference = (exact.run(rows) - rough.run(rows)).abs()
    assert float(difference.max()) < 0.08
    assert 0 < float(difference.mean()) < 5e-3


def test_what_does_not_fit_is_refused() -> None:
    """Latents; pools and places of another kind."""
    with pytest.raises(ValueError, match="a latent cannot be held as int8"):
        Int8KvLayout(1, 80, 0)
    layout = Int8KvLayout(1, 8, 8)
    assert layout.width == 24
    pool = torch.zeros(1, 100, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"pool and rows are torch.int8 and torch.float32"):
        KvCache(pool, 0, KvLayout(1, 8, 8), 4, torch.float32)
    with pytest.raises(ValueError, match=r"pool and rows are torch.float32 and torch.float32"):
        KvCache(torch.zeros(1, 100), 0, layout, 4)
    with pytest.raises(ValueError, match="byte 3 of 100 is no place for factors"):
        KvCache(pool, 3, layout, 4, torch.float32)
    rows, none = torch.zeros(1, 1, 8), np.zeros((1, 1), np.int32)
    cache = KvCache(pool, 0, layout, 4, torch.bfloat16)
    with pytest.raises(ValueError, match=r"pool is torch.bfloat16, expected torch.float32"):
        paged_attention(rows, cache, none, none[0], none[0], AttentionOptions(1.0, 8))
