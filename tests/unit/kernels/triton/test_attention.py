"""Paged attention in Triton: against the reference, with poisoned blocks, and its invariance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.paged_attention import (
    AttentionOptions,
    KvCache,
    paged_attention_reference,
    write_kv_reference,
)
from expertmesh_kernels.triton import attention, kv, ops
from tests.support.blas import needs_bits_of_rows
from tests.support.poison import poisoned
from tests.unit.kernels.triton.test_small import random

LENGTHS = [70, 1, 131]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Shape:
    """Query heads, what a cache holds, tokens of a block, how wide an output is."""

    num_heads: int
    layout: KvLayout
    block_size: int
    value_dim: int


SHAPES = {
    "three queries a key": Shape(3, KvLayout(1, 64, 64), 16, 64),
    "small": Shape(4, KvLayout(2, 8, 8), 4, 8),
    "80": Shape(8, KvLayout(1, 80, 80), 16, 80),
    "wide": Shape(2, KvLayout(2, 128, 128), 32, 128),
    "many heads": Shape(40, KvLayout(1, 24, 24), 24, 24),
    "narrow values": Shape(2, KvLayout(1, 96, 64), 16, 64),
    "wide values": Shape(2, KvLayout(1, 24, 72), 16, 72),
    "latent": Shape(5, KvLayout(1, 144, 0), 8, 128),
}
ROWS = [0, 1, 2, 68, 69, 70, 71, 72, 136, 200, 201]
"""Runs and single rows of all sequences, first and last ones among them."""


class Case:
    """A pool full of NaN but for the sequences' keys and values, and a query per position."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        window: int | None = None,
        softcap: float | None = None,
        *,
        sinks: bool = False,
    ) -> None:
        shape = SHAPES[name]
        self.shape, self.layout = shape, shape.layout
        size = shape.block_size
        num_blocks = [-(-length // size) for length in LENGTHS]
        order = np.random.default_rng(0).permutation(sum(num_blocks) + 2).astype(np.int32)
        self.tables = np.full((len(LENGTHS), max(num_blocks)), 2**31 - 1, np.int32)
        for sequence, (count, end) in enumerate(
            zip(num_blocks, np.cumsum(num_blocks), strict=True)
        ):
            self.tables[sequence, :count] = order[end - count : end]
        self.positions = np.concatenate([np.arange(length) for length in LENGTHS]).astype(np.int32)
        self.sequences = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32)
        blocks = self.tables[self.sequences, self.positions // size].astype(np.int64)
        self.slots = blocks * size + self.positions % size
        pool = torch.full((len(order), self.layout.width * size + 11), torch.nan, dtype=dtype)
        self.cache = KvCache(pool, 7, self.layout, size)
        total = len(self.positions)
        self.k = random(total, self.layout.num_heads, self.layout.key_dim, seed=1).to(dtype)
        self.v = random(total, self.layout.num_heads, self.layout.value_dim, seed=2).to(dtype)
        write_kv_reference(self.k, self.v, self.cache, self.slots)
        self.q = random(total, shape.num_heads, self.layout.key_dim, seed=3).to(dtype)
        sinks_n = random(shape.num_heads, seed=4) * 3 if sinks else None
        self.options = AttentionOptions(0.3, shape.value_dim, window, softcap, sinks_n)

    def reference(self, rows: list[int]) -> Tensor:
        """Attention of some rows, in PyTorch."""
        where = self.tables, self.sequences[rows], self.positions[rows]
        return paged_attention_reference(self.q[rows], self.cache, *where, self.options)

    def run(self, rows: list[int], device: torch.device) -> Tensor:
        """Attention of some rows, in Triton; the queries are a slice with NaN around."""
        sinks_n = self.options.sinks_n
        options = AttentionOptions(
            self.options.scale, self.options.value_dim, self.options.sliding_window,
            self.options.softcap, None if sinks_n is None else sinks_n.to(device),
        )  # fmt: skip
        cache = KvCache(self.cache.pool.to(device), 7, self.layout, self.cache.block_size)
        q = poisoned(self.q[rows].flatten(1).to(device)).unflatten(1, self.q.shape[1:])
        where = self.tables, self.sequences[rows], self.positions[rows]
        return ops.run_attention(q, cache, *where, options)


def check(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding of the weights."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_reference(name: str, device: torch.device) -> None:
    """Every kind of head and value, over runs of rows and single ones."""
    case = Case(name, torch.float32)
    check(case.run(ROWS, device), case.reference(ROWS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (21, 2.0, True), (1, None, True)]
)
def test_options_match_the_reference(
    window: int | None, softcap: float | None, sinks: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Windows, down to the token itself; soft caps; sinks."""
    case = Case("small", dtype, window, softcap, sinks=sinks)
    check(case.run(ROWS, device), case.reference(ROWS))


@needs_bits_of_rows
@pytest.mark.parametrize("name", ["three queries a key", "latent"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_in_any_tile_and_split(
    window: int | None, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone or in a run, and whether splits of the keys are programs of their own or not."""
    monkeypatch.setattr(attention, "SPLIT", 64)
    case = Case(name, torch.float32, window, sinks=True)
    rows = [130, 131, 132, 133, 134, 135, 200, 201]
    together = case.run(rows, device)
    check(together, case.reference(rows))
    assert torch.equal(case.run([132], device), together[2:3])
    assert torch.equal(case.run(rows[3:6], device), together[3:6])
    monkeypatch.setattr(attention, "_BUSY", 0)
    assert torch.equal(case.run(rows, device), together)


@pytest.mark.parametrize("name", ["small", "latent"])
def test_keys_and_values_are_written_where_the_reference_writes_them(
    name: str, device: torch.device
) -> None:
    """Slices of a larger tensor; a negative slot is left out; nothing else changes."""
    case = Case(name, torch.bfloat16)
    pool = torch.full_like(case.cache.pool, torch.nan).to(device)
    pages = kv.DevicePages(pool, 7, case.layout, case.cache.block_size)
    k, v = (
        poisoned(part.flatten(1).to(device)).unflatten(1, part.shape[1:])
        for part in (case.k, case.v)
    )
    slots = torch.from_numpy(case.slots).to(device)
    kv.write_kv(k, v, pages, slots)
    torch.testing.assert_close(pool.cpu(), case.cache.pool, rtol=0, atol=0, equal_nan=True)
    kv.write_kv(k[:2], v[:2], pages, torch.full_like(slots[:2], -1))
    torch.testing.assert_close(pool.cpu(), case.cache.pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["small", "latent"])
def test_int8_keys_and_values_are_near(name: str, device: torch.device) -> None:
    """With a factor per token and head; blocks that are not used hold NaN factors."""
    case, rows = Case(name, torch.float32, sinks=True), [0, 69, 70, 136, 201]
    layout, size = case.layout, case.cache.block_size
    pool = torch.full(case.cache.pool.shape, 77, dtype=torch.int8, device=device)
    scales = torch.full((len(pool) * size, layout.num_heads), torch.nan, device=device)
    value_scales = scales if layout.value_dim == 0 else scales.clone()
    pages = kv.DevicePages(pool, 7, layout, size, scales, value_scales)
    kv.write_kv(
        case.k.to(device), case.v.to(device), pages, torch.from_numpy(case.slots).to(device)
    )
    where = case.sequences[rows], case.positions[rows]
    group = case.shape.num_heads // layout.num_heads
    options = case.options
    assert options.sinks_n is not None
    actual = attention.paged_attention(
        case.q[rows].to(device), pages, torch.from_numpy(case.tables).to(device),
        *(torch.from_numpy(part).to(device) for part in where),
        ops.plan_tiles(*where, group, device),
        attention.Scores(0.3, options.value_dim, sinks_n=options.sinks_n.to(device)), 131,
    )  # fmt: skip
    torch.testing.assert_close(actual.cpu(), case.reference(rows), rtol=0, atol=0.05)
    stored_k = case.k / case.k.abs().amax(-1, keepdim=True) * 127
    assert int(pool.cpu()[:, 7:].ne(77).sum()) > 0.9 * stored_k.numel()


def test_tiles_are_runs_of_rows(device: torch.device) -> None:
    """Cut where a sequence ends, where positions jump, and at the height of a tile."""
    sequences: NDArray[np.int32] = np.array([0] * 20 + [1, 1, 1, 2], np.int32)
    positions: NDArray[np.int32] = np.array([*range(5, 25), 0, 1, 3, 4], np.int32)
    tiles = ops.plan_tiles(sequences, positions, 3, device)
    assert tiles.max_rows == 10
    assert tiles.first_row.tolist() == [0, 10, 20, 22, 23]
    assert tiles.num_rows.tolist() == [10, 10, 2, 1, 1]
