"""Paged attention over random shapes, places, windows and mixes of rows; NaN where nothing is."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.paged_attention import (
    AttentionOptions,
    KvCache,
    paged_attention,
    paged_attention_reference,
    write_kv,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KvLayout, int]:
    """What is remembered, and the width of outputs."""
    key_dim = draw(st.integers(1, 90))
    if draw(st.booleans()):
        return KvLayout(1, key_dim, 0), draw(st.integers(1, key_dim))
    value_dim = draw(st.integers(1, 90))
    return KvLayout(draw(st.integers(1, 3)), key_dim, value_dim), value_dim


@settings(deadline=None, max_examples=60)
@given(
    layouts(),
    st.integers(1, 40),
    st.integers(1, 30),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.sampled_from([None, 1, 3, 17, 64, 90]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_rows_match_the_reference_and_keep_their_bits(
    kind: tuple[KvLayout, int],
    block_size: int,
    group: int,
    lengths: list[int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    """A random part of all positions in random order, against the reference and one by one."""
    layout, value_dim = kind
    rng, num_heads = np.random.default_rng(seed), group * layout.num_heads
    cache, tables = _write(rng, layout, block_size, lengths)
    sequences, positions = _rows(rng, lengths)
    sinks_n = _normal(rng, num_heads) if has_sinks else None
    options = AttentionOptions(0.3, value_dim, window, softcap, sinks_n)
    q_TnD = _normal(rng, len(positions), num_heads, layout.key_dim)
    together = paged_attention(q_TnD, cache, tables, sequences, positions, options)
    expected = paged_attention_reference(q_TnD, cache, tables, sequences, positions, options)
    torch.testing.assert_close(together, expected, rtol=2e-5, atol=2e-5)
    for t in range(0, len(positions), 7):
        row = slice(t, t + 1)
        alone = paged_attention(q_TnD[row], cache, tables, sequences[row], positions[row], options)
        assert torch.equal(alone, together[row])


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def _write(
    rng: np.random.Generator, layout: KvLayout, block_size: int, lengths: list[int]
) -> tuple[KvCache, NDArray[np.int32]]:
    """Sequences in random blocks of a pool of NaN, and their tables."""
    num_blocks = [-(-length // block_size) for length in lengths]
    order = rng.permutation(sum(num_blocks) + 2).astype(np.int32)
    before, after = rng.integers(0, 50, 2)
    width = int(before + layout.width * block_size + after)
    cache = KvCache(torch.full((len(order), width), torch.nan), int(before), layout, block_size)
    tables = np.full((len(lengths), max(num_blocks)), order[-1], np.int32)
    num_keys = layout.num_heads * layout.key_dim
    for sequence, length in enumerate(lengths):
        first = sum(num_blocks[:sequence])
        tables[sequence, : num_blocks[sequence]] = order[first : first + num_blocks[sequence]]
        at = np.arange(length)
        slots = tables[sequence, at // block_size].astype(np.int64) * block_size + at % block_size
        fused_TW = _normal(rng, length, layout.width)
        k_TnD = fused_TW[:, :num_keys].view(length, layout.num_heads, layout.key_dim)
        v_TnD = fused_TW[:, num_keys:].view(length, layout.num_heads, layout.value_dim)
        write_kv(k_TnD, v_TnD, cache, slots)
    return cache, tables


def _rows(
    rng: np.random.Generator, lengths: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sequence and position of some rows: chunks in order, then single rows anywhere."""
    rows = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
    start = int(rng.integers(0, len(rows)))
    chunk = rows[start : start + 40]
    single = [rows[i] for i in rng.integers(0, len(rows), 5)]
    sequences, positions = np.array(chunk + single, np.int32).T
    return np.ascontiguousarray(sequences), np.ascontiguousarray(positions)
