"""KV pool: its size, its settings, and the block tables of the request slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_worker.kv_cache import (
    KvPoolSettings,
    PagedKvCache,
    available_memory,
    choose_num_kv_blocks,
)
from attention_worker.model_states.paged_kv import PagedKvState
from expertmesh.errors import SettingsError
from expertmesh.model_config import (
    DenseFfnConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def _config(*windows: int | None) -> ModelConfig:
    """Two layers, or one for each sliding window."""
    layers = tuple(
        LayerConfig(
            GqaConfig(4, 2, 8, RopeConfig(10_000.0, 8), scale=8**-0.5, sliding_window=window),
            DenseFfnConfig(16),
        )
        for window in windows or (None, None)
    )
    return ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=32,
        layers=layers,
        norm=NormConfig(1e-5),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def _settings(**changes: int | float | None) -> KvPoolSettings:
    values: dict[str, int | float | None] = {"block_size": 4, "max_num_seqs": 3}
    values |= {"max_model_len": 10, "max_step_tokens": 4} | changes
    return KvPoolSettings(**values)  # type: ignore[arg-type]


def _state(num_blocks: int = 8) -> PagedKvState:
    return PagedKvState(PagedKvCache(_config(), num_blocks, 4, BF16, CPU), 4, 18)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_places_are_laid_out_alike_whatever_the_step(num_rows: int) -> None:
    """Another layout is another type to compiled kernels, which would compile for it in a step."""
    state = PagedKvState(PagedKvCache(_config(None, 6), 8, 4, BF16, CPU), 4, 18)
    for group in range(2):
        state.append_blocks(0, group, 0, [2 * group, 2 * group + 1], 0)
    rows_T, positions_T = np.zeros(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
    places = state.prepare(np.zeros(1, np.int64), rows_T, positions_T).places
    for array in places:
        assert array.flags.c_contiguous
        assert array.flags.writeable
    assert places.slots_GT.tolist() == [
        [4 * block + at for block in (first, first + 1) for at in range(4)][:num_rows]
        for first in (0, 2)
    ]


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    """2 layers x keys and values x 2 heads x 8 x 4 tokens x 2 bytes."""
    kv = PagedKvCache(_config(), 5, 4, BF16, CPU)
    assert kv.block_bytes == 512
    assert kv.pool.shape == (6, 256), "one more than asked for: the null block"
    assert [(layer.offset, layer.elements) for layer in kv.layers] == [(0, 128), (128, 128)]


def test_block_bytes_of_int8_count_factors() -> None:
    """2 layers x (keys and values x 2 heads x 8 x 1 byte + 2 heads x 2 factors x 4 bytes) x 4."""
    kv = PagedKvCache(_config(), 5, 4, BF16, CPU, int8=True)
    assert kv.block_bytes == 2 * (2 * 2 * 8 + 2 * 2 * 4) * 4
    wide = replace(_config().layers[0].gqa, head_dim=64)
    config = replace(_config(), layers=(replace(_config().layers[0], attention=wide),) * 2)
    kv = PagedKvCache(config, 5, 4, BF16, CPU, int8=True)
    assert kv.block_bytes == 2 * (2 * 2 * 64 + 2 * 2 * 4) * 4
    assert kv.block_bytes < 0.54 * PagedKvCache(config, 5, 4, BF16, CPU).block_bytes
    settings = _settings(max_num_seqs=100, memory_fraction=0.5, int8=True)
    assert choose_num_kv_blocks(config, settings, BF16, kv.block_bytes * 20) == 10


def test_pool_is_the_smaller_of_memory_and_need() -> None:
    """Plenty of memory: 3 sequences of 3 blocks. Little: what the fraction allows."""
    assert choose_num_kv_blocks(_config(), _settings(), BF16, 2**30) == 9
    scarce = _settings(memory_fraction=0.5)
    assert choose_num_kv_blocks(_config(), scarce, BF16, 512 * 10) == 5


def test_asked_for_tokens_are_given() -> None:
    """A token count is rounded down to blocks, whatever the sequences need."""
    settings = _settings(cache_tokens=47)
    assert choose_num_kv_blocks(_config(), settings, BF16, 2**30) == 11


def test_pool_too_small_for_one_sequence_is_refused() -> None:
    """The message has the tokens that fit and the tokens that must."""
    with pytest.raises(SettingsError, match=r"room for 8 tokens .*kv_cache_tokens=8.*len=10"):
        choose_num_kv_blocks(_config(), _settings(cache_tokens=8), BF16, 2**30)
    with pytest.raises(SettingsError, match=r"room for 8 tokens .*50%.*max_model_len=10"):
        choose_num_kv_blocks(_config(), _settings(memory_fraction=0.5), BF16, 512 * 4)


def test_pool_larger_than_memory_is_refused() -> None:
    """The message has both sizes and what would fit."""
    settings = _settings(cache_tokens=2**20)
    with pytest.raises(SettingsError, match=r"needs 128 MiB, but only 1 MiB.*at most 8192"):
        choose_num_kv_blocks(_config(), settings, BF16, 2**20)


def test_available_memory_is_within_the_machine() -> None:
    """A positive number, no more than the machine has."""
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_memory(CPU) <= total_kib * 1024


def test_layers_of_a_group_share_a_block() -> None:
    """Groups of two layers each: a block has the keys and values of two."""
    kv = PagedKvCache(_config(None, 6, None, 6), 5, 4, BF16, CPU)
    assert kv.block_bytes == 512
    assert kv.sliding_windows == (None, 6)
    assert tuple(kv.pages.group_of_layer_L) == (0, 1, 0, 1)
    assert [layer.offset for layer in kv.layers] == [0, 0, 128, 128]


def test_a_window_needs_no_room_for_what_is_behind_it() -> None:
    """Sequences of 40 tokens have 10 blocks where all is seen. With a window of 6 and steps of 4
    it is 9 tokens at a time, in 3 blocks; steps of 6 make it 11, in 4, but not of all at once."""
    windowed = _settings(max_model_len=40)
    assert choose_num_kv_blocks(_config(6), windowed, BF16, 2**30) == 3 * 3
    assert choose_num_kv_blocks(_config(None, 6), windowed, BF16, 2**30) == 3 * (10 + 3)
    larger_steps = _settings(max_model_len=40, max_step_tokens=6)
    assert choose_num_kv_blocks(_config(6), larger_steps, BF16, 2**30) == 2 * 3 + 4


def test_asked_for_tokens_are_given_in_every_group() -> None:
    """They may all be of sequences that are within the window."""
    settings = _settings(cache_tokens=64)
    assert choose_num_kv_blocks(_config(None, 6), settings, BF16, 2**30) == 2 * 16
    with pytest.raises(SettingsError, match=r"room for 8 tokens .*128 bytes per token.*len=10"):
        choose_num_kv_blocks(_config(None, 6), _settings(cache_tokens=8), BF16, 2**30)


def test_tables_grow_and_place_rows() -> None:
    """Rows find their own place in the block that holds their position."""
    state = _state()
    state.append_blocks(2, 0, 0, [7, 0], 0)
    state.append_blocks(2, 0, 2, [3], 0)
    state.append_blocks(0, 0, 0, [5], 0)
    inputs = state.prepare(
        np.array([2, 0]), np.array([0, 0, 1], np.int32), np.array([3, 9, 2], np.int32)
    )
    layer = inputs.of_layer(1)
    assert layer.cache is state.kv.layers[1]
    assert layer.kv_slots_T.tolist() == [7 * 4 + 3, 3 * 4 + 1, 5 * 4 + 2]
    assert layer.block_tables_SB[0].tolist() == [7, 0, 3]
    assert layer.block_tables_SB[1, 0] == 5


def test_repeated_append_changes_nothing() -> None:
    """A retried delta is taken as what it is."""
    state = _state()
    state.append_blocks(0, 0, 0, [1, 2], 0)
    state.append_blocks(0, 0, 1, [2], 0)
    state.append_blocks(0, 0, 0, [1, 2], 0)
    assert state.block_table(0).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([8], r"slot 1: KV block 8 is out of range: the pool has 8 blocks"),
        ([4, 4], r"slot 1: KV blocks \[4, 4\] repeat a block"),
        ([0, 5], r"slot 1: KV blocks \[0, 5\] repeat a block"),
        ([2, 3, 4, 5, 6], r"slot 1: 7 KV blocks are more than max_model_len needs \(5\)"),
    ],
)
def test_impossible_blocks_are_refused(block_ids: list[int], message: str) -> None:
    """The message names slot, value and limit; the table stays."""
    state = _state()
    state.append_blocks(1, 0, 0, [0, 1], 0)
    with pytest.raises(ValueError, match=message):
        state.append_blocks(1, 0, 2, block_ids, 0)
    assert state.block_table(1).tolist() == [0, 1]
