"""Routing that prefers two experts, on workers with pretended devices, before and after moves."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.upcycle import upcycle
from tests.chaos.harness import orders
from tests.chaos.harness.leading import led_by_gateway, wait_placed
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import mesh_at
from tests.chaos.harness.pool import PoolWorker, expert_pool
from tests.chaos.harness.streams import Workload
from tests.chaos.harness.table import Row
from tests.conftest import Models
from tests.support.processes import poll
from tests.support.tiny_checkpoints import LLAMA

pytestmark = [pytest.mark.alone, pytest.mark.chaos]

NUM_EXPERTS, NUM_WORKERS, NUM_STREAMS = 16, 4, 16
SKEW = 8.0
SHAPE = replace(LLAMA, seed=27)
HOT_SHARE, GAIN = 0.9, 1.3
PROGRAM = ("-m", "bench.timed_expert_worker", "--call-us", "200", "--expert-us", "2000")
FLOAT32 = ("--dtype", "float32")
_COUNTED_REQUESTS, _TIMED_REQUESTS = 48, 96


@pytest.fixture(scope="module")
def skewed_model(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 16 experts whose gate prefers two in each layer.

    A gate prefers by the mean of the hidden states; that of a random model is near zero, so one
    element of all embeddings is made large.
    """
    folder = tmp_path_factory.mktemp("skewed") / "model"
    dense = shutil.copytree(models.tiny(SHAPE), folder.with_name("dense"))
    tensors = load_file(dense / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 6.0
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    upcycle(
        dense,
        folder,
        num_experts=NUM_EXPERTS,
        top_k=2,
        granular=False,
        router_skew=SKEW,
        progress=NoProgress(),
    )
    return folder


@pytest.fixture
def workers(skewed_model: Path) -> Iterator[list[PoolWorker]]:
    """Four, on pretended devices that need 2 ms for each distinct expert of a call.

    Shared cores cannot show what balance is worth: a worker with little to do leaves its core to
    the others.
    """
    shares = [f"{index}/{NUM_WORKERS}" for index in range(NUM_WORKERS)]
    with expert_pool(skewed_model, shares, FLOAT32, program=PROGRAM) as started:
        yield started


def test_hot_experts(
    skewed_model: Path, workers: list[PoolWorker], table: list[Row], tmp_path: Path
) -> None:
    """With both hot experts on one worker, moves by the leader make it 1.3 times as fast."""
    workload = Workload(SHAPE.vocab_size)
    row = Row("hot experts on one worker, then moved")
    table.append(row)
    with mesh_at(skewed_model, workers, [worker.address for worker in workers]) as mesh:
        _tokens_per_s(mesh.api.port, workload, _COUNTED_REQUESTS)
        pairs = _pairs(workers)
        hot = _hot_share(pairs)
        orders.place(mesh, _hottest_together(pairs))
        before = _tokens_per_s(mesh.api.port, workload, _TIMED_REQUESTS)
    with led_by_gateway(skewed_model, workers, tmp_path / "lock", min_copies=1) as server:
        with Load([server.api.port], workload, NUM_STREAMS) as load:
            load.wait_tokens(2000)
            assert server.api.post("/admin/placement/rebalance", {}).status < 300
            poll(
                lambda: server.api.metrics()["moe_placement_moves_total"] > 0,
                timeout_s=60.0,
                what="experts are moved",
            )
            wait_placed(server.api, NUM_WORKERS, min_copies=1)
            load.finish()
        after = _tokens_per_s(server.api.port, workload, _TIMED_REQUESTS)
    row.note = f"{after / before:.2f} times the tokens per second; {hot:.0%} of rows to 2 of 16"
    assert hot >= HOT_SHARE
    assert after / before >= GAIN


def _tokens_per_s(port: int, workload: Workload, count: int) -> float:
    with Load([port], workload, NUM_STREAMS, count=count) as load:
        streams = load.wait()
    assert [stream.error for stream in streams if stream.error] == []
    times_s = sorted(time_s for stream in streams for time_s in stream.times_s)
    return len(times_s) / (times_s[-1] - times_s[0])


def _pairs(workers: Sequence[PoolWorker]) -> Counter[tuple[int, int]]:
    """(Row, expert) pairs that each expert of each layer has computed."""
    computed: Counter[tuple[int, int]] = Counter()
    for worker in workers:
        for held in worker.state().layers:
            for expert, count in zip(held.resident, held.pairs, strict=True):
                computed[held.layer, expert] += count
    return computed


def _by_heat(pairs: Mapping[tuple[int, int], int]) -> dict[int, list[int]]:
    """Experts of each layer, the hottest first."""
    return {
        layer: sorted(range(NUM_EXPERTS), key=lambda expert: -pairs[layer, expert])
        for layer in range(SHAPE.num_layers)
    }


def _hot_share(pairs: Mapping[tuple[int, int], int]) -> float:
    """Of all pairs, those of the two hottest experts of their layer."""
    hot = sum(
        pairs[layer, expert] for layer, ranks in _by_heat(pairs).items() for expert in ranks[:2]
    )
    return hot / sum(pairs.values())


def _hottest_together(pairs: Mapping[tuple[int, int], int]) -> list[orders.Pairs]:
    """As many experts of each layer on each worker, in the order of their heat."""
    share = NUM_EXPERTS // NUM_WORKERS
    return [
        frozenset(
            (layer, expert)
            for layer, ranks in _by_heat(pairs).items()
            for expert in ranks[worker * share : (worker + 1) * share]
        )
        for worker in range(NUM_WORKERS)
    ]
