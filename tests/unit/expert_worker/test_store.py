"""Resident experts: what is read, what is kept, and what waits for what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from expert_worker.store import ExpertStore, ExpertStoreError, LayerResidency
from expertmesh.checkpoint import Checkpoint
from expertmesh.expert_fingerprint import read_fingerprint
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.safetensors_file import pread_into
from expertmesh_kernels.grouped_mlp import ExpertWeights
from tests.conftest import Models
from tests.support.tiny_checkpoints import MIXTRAL

TIMEOUT_S = 10.0


@pytest.fixture
def model_dir(models: Models) -> Path:
    """A tiny Mixtral: 3 layers, 8 experts."""
    return models.tiny(MIXTRAL)


@pytest.fixture
def store(model_dir: Path) -> ExpertStore:
    """An empty store."""
    return ExpertStore(Checkpoint.open(model_dir), "float32")


def test_only_own_experts_are_read(model_dir: Path) -> None:
    """Loading two experts reads their bytes from disk, and not a byte more."""
    num_read = 0

    def count(descriptor: int, buffer: memoryview, offset: int) -> int:
        nonlocal num_read
        got = pread_into(descriptor, buffer, offset)
        num_read += got
        return got

    store = ExpertStore(Checkpoint.open(model_dir, read_into=count), "float32")
    num_read = 0  # headers
    store.load(0, 3)
    store.load(2, 7)
    assert num_read == 2 * store.bytes_per_expert
    assert store.num_used_slots == 2


def test_biases_count_as_memory_of_an_expert(tmp_path: Path) -> None:
    """Those of both matrices; they are resident with the expert."""
    make_tiny("gpt_oss", tmp_path / "biased")
    store = ExpertStore(Checkpoint.open(tmp_path / "biased"), "float32")
    config = store.config
    wide, hidden = config.moe_ffn(0).intermediate_size, config.hidden_size
    assert store.bytes_per_expert == 4 * (3 * wide * hidden + 2 * wide + hidden)
    assert store.bytes_per_expert == store.checkpoint.read_expert(0, 0).nbytes
    store.load(0, 0)
    with store.lease(0) as experts:
        biases = (experts[0].gate_up.bias_N, experts[0].down.bias_N)
    assert [len(bias) for bias in biases if bias is not None] == [2 * wide, hidden]


def test_resident_bytes_are_those_of_own_experts(store: ExpertStore) -> None:
    """Memory grows by each expert, by little more than its weights, and shrinks again."""
    assert store.resident_bytes == 0
    for expert in range(4):
        store.load(1, expert)
        held = store.resident_bytes
        assert (expert + 1) * store.bytes_per_expert <= held
        assert held < (expert + 1) * store.bytes_per_expert * 1.5  # columns padded for the kernel
    store.retire(1, 2)
    store.unload(1, 2, TIMEOUT_S)
    assert store.resident_bytes == held * 3 // 4


def test_weights_are_those_of_the_checkpoint(store: ExpertStore) -> None:
    """Gate rows come first, then up, and down is apart; all as the checkpoint has them."""
    store.load(1, 5)
    tensors = store.checkpoint.read_expert(1, 5)
    with store.lease(1) as experts:
        weights = experts[5]
        gate_up_HN = torch.from_numpy(tensors.gate_up.data).T
        assert torch.equal(gate_up_HN, weights.gate_up.weight_KN)
        assert torch.equal(torch.from_numpy(tensors.down.data).T, weights.down.weight_KN)


def test_life_of_an_expert(store: ExpertStore) -> None:
    """Absent, resident, retiring, resident again, retiring, absent; every change is announced."""
    changes = 0

    def note() -> None:
        nonlocal changes
        changes += 1

    store.on_change = note
    store.load(1, 2)
    there = {1: LayerResidency((2,), (), (read_fingerprint(store.checkpoint, 1, 2),))}
    assert store.residency() == there
    assert store.retire(1, 2)
    assert store.residency() == {1: LayerResidency((), (2,), ())}
    store.load(1, 2)
    assert store.residency() == there
    with pytest.raises(ExpertStoreError, match="loaded again"):
        store.unload(1, 2, TIMEOUT_S)
    store.retire(1, 2)
    store.unload(1, 2, TIMEOUT_S)
    assert store.residency() == {}
    assert not store.retire(1, 2)
    assert changes == 5


def test_unload_waits_for_calls(store: ExpertStore) -> None:
    """An expert is freed only when the call that uses it has ended; new calls do not see it."""
    store.load(0, 1)
    store.retire(0, 1)
    freed = threading.Event()

    def unload() -> None:
        store.unload(0, 1, TIMEOUT_S)
        freed.set()

    gone = threading.Event()
    store.on_change = gone.set
    with store.lease(0) as experts:
        thread = threading.Thread(target=unload, name="unload")
        thread.start()
        assert gone.wait(TIMEOUT_S)
        assert isinstance(experts[1], ExpertWeights)
        with store.lease(0) as later:
            assert 1 not in later
        assert not freed.is_set()
    assert freed.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)


def test_unload_gives_up_after_its_timeout(store: ExpertStore) -> None:
    """A call that never ends is reported, not waited for without end."""
    store.load(0, 1)
    store.retire(0, 1)
    with store.lease(0), pytest.raises(ExpertStoreError, match="calls still use layer 0 expert 1"):
        store.unload(0, 1, 0.01)


def test_leases_of_other_layers_do_not_matter(store: ExpertStore) -> None:
    """The same expert number of another layer may be in use."""
    store.load(0, 1)
    store.load(1, 1)
    store.retire(0, 1)
    with store.lease(1):
        store.unload(0, 1, 0.01)


def test_wrong_experts_are_named(store: ExpertStore) -> None:
    """Layers and experts that do not exist are refused by name."""
    with pytest.raises(ExpertStoreError, match="layer 9 has no experts"):
        store.load(9, 0)
    with pytest.raises(ExpertStoreError, match="layer 0 has experts 0 to 7, not 8"):
        store.load(0, 8)
    with pytest.raises(ExpertStoreError, match="not -1"):
        store.retire(0, -1)


def test_slots_are_limited(model_dir: Path) -> None:
    """A full store refuses; a freed slot can be used again; loading twice takes one slot."""
    store = ExpertStore(Checkpoint.open(model_dir), "float32", num_slots=2)
    store.load(0, 0)
    store.load(0, 0)
    store.load(0, 1)
    with pytest.raises(ExpertStoreError, match="all 2 are in use"):
        store.load(1, 0)
    store.retire(0, 0)
    store.unload(0, 0, TIMEOUT_S)
    store.load(1, 0)
    assert store.num_used_slots == 2
