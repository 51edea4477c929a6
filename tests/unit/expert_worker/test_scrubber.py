"""Weights that are changed in memory: found wherever it is, refused, and loaded again."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expert_worker import packed_sums
from expert_worker.packed_sums import arrays_of
from expert_worker.scrubber import MemoryScrubber, NoScrubber, make_scrubber
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.families.config_reader import Json
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.quantize import quantize_model
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import expert_server
from tests.support.expert_wire import RawStream, channel, request
from tests.support.processes import poll
from tests.support.quantized_folders import compressed
from tests.support.tiny_checkpoints import MIXTRAL

TIMEOUT_S = 10.0
LAYER, EXPERT = 1, 3
FAST = 1 << 20
INT4 = compressed(group_size=32)
FP8: Json = {"quant_method": "fp8", "weight_block_size": [16, 32]}

Make = Callable[[Models, Path], ExpertStore]


def plain(models: Models) -> Path:
    """A tiny Mixtral, sizes that groups of 32 divide."""
    return models.tiny(replace(MIXTRAL, hidden_size=64, num_heads=4, intermediate_size=96))


def stored(quantization: Json) -> Make:
    """Of a checkpoint that is quantised so."""

    def make(models: Models, folder: Path) -> ExpertStore:
        quantize_model(plain(models), folder / "model", quantization)
        return ExpertStore(Checkpoint.open(folder / "model"), "bfloat16")

    return make


def biased(_models: Models, folder: Path) -> ExpertStore:
    """Of a model whose experts have biases."""
    make_tiny("gpt_oss", folder / "model")
    return ExpertStore(Checkpoint.open(folder / "model"), "bfloat16")


STORES: dict[str, Make] = {
    "float32": lambda models, _: ExpertStore(Checkpoint.open(plain(models)), "float32"),
    "bfloat16": lambda models, _: ExpertStore(Checkpoint.open(plain(models)), "bfloat16"),
    "float16": lambda models, _: ExpertStore(Checkpoint.open(plain(models)), "float16"),
    "int8 on load": lambda models, _: ExpertStore(
        Checkpoint.open(plain(models)), "float32", expert_dtype="int8"
    ),
    "int4": stored(INT4),
    "fp8": stored(FP8),
    "biases": biased,
}


@pytest.fixture
def store(models: Models) -> ExpertStore:
    """An empty one."""
    return ExpertStore(Checkpoint.open(models.tiny(MIXTRAL)), "float32")


def flip(store: ExpertStore, array: int, byte: int, bit: int) -> None:
    """Changes a bit of an expert's memory."""
    with store.lease(LAYER) as experts:
        arrays_of(experts[EXPERT])[array][byte] ^= 1 << bit


@pytest.mark.parametrize("make", STORES.values(), ids=STORES.keys())
def test_any_bit_is_found_and_mended(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """In any array that kernels read, at its ends, in the middle and where pieces meet."""
    monkeypatch.setattr(packed_sums, "PIECE_BYTES", 1000)
    store = make(models, tmp_path)
    scrubber = MemoryScrubber(store, store.load, FAST)
    for layer, expert in ((LAYER, 0), (LAYER, EXPERT), (0, EXPERT)):
        store.load(layer, expert)
    scrubber.look_at_all()
    with store.lease(LAYER) as experts:
        before = [array.copy() for array in arrays_of(experts[EXPERT])]
    nbytes = 3 * sum(array.nbytes for array in before)
    assert (scrubber.counts().damaged, scrubber.counts().nbytes) == (0, nbytes)
    assert nbytes >= store.resident_bytes  # biases are read in float32
    num_flips = 0
    for index, array in enumerate(before):
        places = {0, 999, 1000, array.size // 2, array.size - 1} if array.size else set()
        for byte in sorted(place for place in places if place < array.size):
            flip(store, index, byte, bit=byte % 8)
            scrubber.look_at_all()
            num_flips += 1
            assert scrubber.counts().damaged == num_flips, (index, byte)
            with store.lease(LAYER) as experts:
                after = arrays_of(experts[EXPERT])
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert num_flips >= 10


def test_a_changed_expert_is_not_there_until_it_was_loaded(
    store: ExpertStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of its layer are; a line names it; who loads finds a free slot."""
    seen: list[tuple[int, ...]] = []
    store.limit_slots(2)

    def reload(layer: int, expert: int) -> None:
        seen.append(store.residency()[layer].resident)
        store.load(layer, expert)

    scrubber = MemoryScrubber(store, reload, FAST)
    store.load(LAYER, EXPERT)
    store.load(LAYER, 5)
    flip(store, 2, 100, bit=6)
    with caplog.at_level(logging.ERROR):
        scrubber.look_at_all()
    assert seen == [(5,)]
    assert store.residency()[LAYER].resident == (EXPERT, 5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"layer {LAYER} expert {EXPERT} was changed in memory" in line


def test_an_expert_that_is_unloaded_meanwhile_is_left_alone(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was loaded again, and whatever has become of its old memory."""
    scrubber = MemoryScrubber(store, _never, FAST)
    store.load(LAYER, EXPERT)
    sum_up = packed_sums.checksum_of

    def interrupted(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        monkeypatch.setattr(packed_sums, "checksum_of", sum_up)
        with store.lease(LAYER) as experts:
            old = experts[EXPERT]
        store.retire(LAYER, EXPERT)
        store.unload(LAYER, EXPERT, TIMEOUT_S)
        arrays_of(old)[0][:] = 0
        store.load(LAYER, EXPERT)
        return sum_up(data)

    monkeypatch.setattr(packed_sums, "checksum_of", interrupted)
    scrubber.look_at_all()
    assert scrubber.counts().damaged == 0
    assert store.residency()[LAYER].resident == (EXPERT,)
    scrubber.look_at_all()
    assert scrubber.counts().damaged == 0


def test_it_keeps_no_memory_of_what_is_gone(store: ExpertStore) -> None:
    """An expert that was looked at is freed as soon as it is unloaded."""
    scrubber = MemoryScrubber(store, _never, FAST)
    store.load(LAYER, EXPERT)
    scrubber.look_at_all()
    with store.lease(LAYER) as experts:
        weights = weakref.ref(experts[EXPERT])
    del experts
    store.retire(LAYER, EXPERT)
    store.unload(LAYER, EXPERT, TIMEOUT_S)
    gc.collect()
    assert weights() is None
    scrubber.look_at_all()


def test_an_expert_worker_mends_itself(store: ExpertStore) -> None:
    """In the background of a server that answers; outputs are then what they were."""
    with expert_server(store, scrub_mib_per_s=FAST) as server, channel(server) as opened:
        for expert in (0, 1, EXPERT):
            store.load(LAYER, expert)
        server.warm_up(LAYER, 0)
        call = request(server).SerializeToString()
        (before,) = RawStream(opened, [call]).read()
        assert before.WhichOneof("result") == "outputs"
        flip(store, 0, 3, bit=6)
        poll(
            lambda: (
                server.scrubber.counts().damaged == 1
                and store.residency()[LAYER].resident == (0, 1, EXPERT)
            ),
            timeout_s=TIMEOUT_S,
            what="it is mended",
        )
        (after,) = RawStream(opened, [call]).read()
        assert after.outputs == before.outputs


def test_calls_for_a_discarded_expert_are_refused(store: ExpertStore) -> None:
    """As after an unload: whoever asks goes elsewhere."""
    with expert_server(store) as server, channel(server) as opened:
        for expert in (0, 1, EXPERT):
            store.load(LAYER, expert)
        with store.lease(LAYER) as experts:
            assert store.discard(LAYER, EXPERT, experts[EXPERT])
        server.warm_up(LAYER, 0)
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.error.code == pb.ForwardError.CODE_EXPERT_NOT_RESIDENT
        assert not store.discard(LAYER, EXPERT, experts[EXPERT])


def test_it_can_be_turned_off(store: ExpertStore) -> None:
    """Then nothing is summed, when experts are loaded either."""
    before = store.on_packed
    assert isinstance(make_scrubber(store, _never, 0), NoScrubber)
    assert store.on_packed is before
    assert isinstance(make_scrubber(store, _never, 1), MemoryScrubber)


def _never(layer: int, expert: int) -> None:
    raise AssertionError(f"layer {layer} expert {expert} is loaded again")
