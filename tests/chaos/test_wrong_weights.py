"""One wrong weight: in the checkpoint of an expert worker, and in the memory of one that runs.

The first is found before it computes a token. The second is found by looking at the memory again
and again; tokens until then may be other ones, and are counted apart.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.chaos.harness.checks import changed, failed, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import NUM_COPIES, NUM_WORKERS, Mesh, mesh_at
from tests.chaos.harness.pool import PoolWorker, running, shares_with_copies
from tests.chaos.harness.streams import Streamed
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.api import Api
from tests.support.changed_weights import with_changed_weight
from tests.support.processes import free_port, poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

FLIPPING = ("-m", "tests.chaos.harness.flipping_expert_worker")
FLAGS = ("--dtype", "float32")
SHARES = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
WRONG = "moe_wrong_expert_copies_total"
WITHIN_S = 60.0
"""In which a change in memory must be found."""
START_TIMES, RESTART_TIMES, FLIP_TIMES = 5, 5, 10
CALM_TOKENS = 3000
"""Between two flips: enough for streams that see neither."""


def any_weight(share: str, chance: random.Random) -> str:
    """A tensor of an expert of this share."""
    layer, expert = chance.randrange(MIXTRAL.num_layers), chance.choice(share.split(","))
    part = chance.choice(("w1", "w2", "w3"))
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"


def change(model: Path, folder: Path, share: str, chance: random.Random) -> None:
    """Makes the folder a copy of the model with one other weight."""
    shutil.rmtree(folder, ignore_errors=True)
    index = chance.randrange(100, 3000)  # not at the ends, which the model's fingerprint sees
    with_changed_weight(model, folder, any_weight(share, chance), index=index, value=10.0)


def test_at_start(tiny_mixtral: Path, traffic: Traffic, tmp_path: Path, table: list[Row]) -> None:
    """One of three has another weight from the beginning: no token is computed with it."""
    row = Row("one weight of the checkpoint of 1 of 3, at start", times=START_TIMES)
    table.append(row)
    chance = random.Random(20)
    for turn in range(START_TIMES):
        victim = chance.randrange(NUM_WORKERS)
        folders = [tiny_mixtral] * NUM_WORKERS
        folders[victim] = tmp_path / f"changed{turn}"
        change(tiny_mixtral, folders[victim], SHARES[victim], chance)
        members = [PoolWorker(*both, FLAGS) for both in zip(folders, SHARES, strict=True)]
        with (
            running(members) as workers,
            mesh_at(tiny_mixtral, workers, [worker.address for worker in workers]) as mesh,
        ):
            assert mesh.api.metrics()[WRONG] == 1
            with Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load:
                load.wait_tokens(CALM_TOKENS)
                streams = load.finish()
            wait_idle(mesh.api)
            judge(streams, traffic.expected, row)
            assert members[victim].state().load.calls > 0
    row.note = "all found before the first request"


def test_at_a_restart(
    tiny_mixtral: Path, traffic: Traffic, tmp_path: Path, table: list[Row]
) -> None:
    """One of three is killed under load and comes back with another weight."""
    row = Row("one weight of the checkpoint of 1 of 3, at a restart", times=RESTART_TIMES)
    table.append(row)
    chance = random.Random(21)
    own = shutil.copytree(tiny_mixtral, tmp_path / "own")
    folders = (own, tiny_mixtral, tiny_mixtral)
    members = [PoolWorker(*both, FLAGS) for both in zip(folders, SHARES, strict=True)]
    with (
        running(members) as workers,
        mesh_at(tiny_mixtral, workers, [worker.address for worker in workers]) as mesh,
        Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load,
    ):
        for turn in range(RESTART_TIMES):
            load.wait_tokens(RUNNING_TOKENS)
            members[0].kill()
            change(tiny_mixtral, own, SHARES[0], chance)
            began_s = time.monotonic()
            members[0].start()
            members[0].wait_ready()
            wait_count(mesh.api, WRONG, turn + 1)
            row.recoveries_s.append(time.monotonic() - began_s)
            mesh.wait_all_ready()
            load.wait_tokens(CALM_TOKENS)
        streams = load.finish()
        wait_idle(mesh.api)
        judge(streams, traffic.expected, row)


@dataclass(frozen=True)
class Flip:
    """A change of memory, on the monotonic clock."""

    at_s: float
    found_s: float
    mended_s: float

    def may_have_met(self, stream: Streamed) -> bool:
        """True if the stream was open meanwhile."""
        return stream.started_s <= self.mended_s and stream.ended_s >= self.at_s


def test_in_memory(tiny_mixtral: Path, traffic: Traffic, table: list[Row]) -> None:
    """A weight in memory is changed: found and mended within its time, and no request fails.

    Streams that were not open meanwhile have their tokens. Prefixes are not cached, as what was
    computed with the wrong weight would stay there.
    """
    row = Row("one weight in the memory of 1 of 3", times=FLIP_TIMES)
    table.append(row)
    chance = random.Random(22)
    ports = [free_port() for _ in SHARES]
    members = [
        PoolWorker(tiny_mixtral, share, (*FLAGS, "--metrics-port", str(port)), FLIPPING)
        for share, port in zip(SHARES, ports, strict=True)
    ]
    with (
        running(members) as workers,
        mesh_at(
            *(tiny_mixtral, workers, [worker.address for worker in workers]),
            flags=("--no-prefix-caching",),
        ) as mesh,
        Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load,
    ):
        flips = []
        for _ in range(FLIP_TIMES):
            load.wait_tokens(CALM_TOKENS)
            victim = chance.randrange(NUM_WORKERS)
            flips.append(flip(mesh, members[victim], Api(ports[victim])))
        load.wait_tokens(CALM_TOKENS)
        streams = load.finish()
        wait_idle(mesh.api)
    _tell(row, flips, streams, traffic)


def flip(mesh: Mesh, victim: PoolWorker, worker: Api) -> Flip:
    """Changes a weight; returns when it was found, loaded again and is used."""
    before = worker.metrics()
    at_s = time.monotonic()
    os.kill(victim.pid, signal.SIGUSR1)
    damaged, resident = "moe_worker_damaged_experts_total", "moe_worker_resident_experts"
    wait_count(worker, damaged, before[damaged] + 1)
    found_s = time.monotonic()
    wait_count(worker, resident, before[resident])
    mesh.wait_all_ready()
    return Flip(at_s, found_s, time.monotonic())


def wait_count(api: Api, name: str, count: float) -> None:
    """Waits until a metric has this value."""
    poll(lambda: api.metrics()[name] == count, timeout_s=WITHIN_S, what=f"{name} is {count}")


def _tell(row: Row, flips: Sequence[Flip], streams: list[Streamed], traffic: Traffic) -> None:
    met = [stream for stream in streams if any(flip.may_have_met(stream) for flip in flips)]
    others = [stream for stream in streams if stream not in met]
    found_s = [flip.found_s - flip.at_s for flip in flips]
    row.recoveries_s = [flip.mended_s - flip.at_s for flip in flips]
    row.note = (
        f"found after {median(found_s):.2f} s, {max(found_s):.2f} at most; meanwhile "
        f"{len(changed(met, traffic.expected))} of {len(met)} open streams were changed"
    )
    assert failed(met) == []
    assert len(others) > NUM_STREAMS
    judge(others, traffic.expected, row)
