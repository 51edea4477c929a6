"""A mesh with several copies of each expert, and faults that hit it while streams are open."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.harness.checks import Answers, changed, failed, stall_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.pool import PoolWorker, expert_pool, shares_with_copies
from tests.chaos.harness.requests import Streamed, Workload
from tests.chaos.harness.table import Row
from tests.support.api import Api
from tests.support.mesh import Server, gateway
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

NUM_WORKERS, NUM_COPIES, NUM_STREAMS = 3, 2, 8
HIT_WITHIN_S = 0.1
"""A worker of which nothing was wanted for so long was not hit."""
_RUNNING_TOKENS = 100  # when all streams surely are open
_READY_TIMEOUT_S = 60.0


@dataclass
class Mesh:
    """Expert workers, and a gateway that knows their addresses."""

    workers: Sequence[PoolWorker]
    server: Server

    @property
    def api(self) -> Api:
        """Of the gateway."""
        return self.server.api

    def states(self) -> list[str]:
        """What the gateway says of each expert worker."""
        return [worker["state"] for worker in self.api.ready().json["workers"]]

    def wait_all_ready(self) -> None:
        """Waits until the gateway can use every expert worker."""
        poll(
            lambda: self.states() == ["ready"] * len(self.workers),
            timeout_s=_READY_TIMEOUT_S,
            what="all expert workers are ready",
        )


@contextmanager
def mesh_of_copies(model: Path, *flags: str) -> Iterator[Mesh]:
    """Three expert workers, each expert on two of them, all on one thread each.

    Args:
        model: Checkpoint folder.
        flags: More flags of the gateway.
    """
    shares = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
    with (
        expert_pool(model, shares, ("--dtype", "float32")) as workers,
        gateway(model, [worker.address for worker in workers], "--threads", "1", *flags) as server,
    ):
        mesh = Mesh(workers, server)
        mesh.wait_all_ready()
        yield mesh


Fault = Callable[[Mesh, random.Random], float]
"""Does harm, mends it, and returns when it was done, on the monotonic clock."""


def suffer(
    mesh: Mesh, fault: Fault, row: Row, workload: Workload, expected: Answers, seed: int
) -> None:
    """Has a fault hit `row.times` times at random moments while streams are open.

    Fails if a request fails or is answered differently. All that clients saw is in the row.

    Args:
        mesh: Serves.
        fault: What happens.
        row: What was seen is put here.
        workload: Requests.
        expected: What they must be answered.
        seed: Of the moments, and for the fault's own choices.
    """
    chance = random.Random(seed)
    faults_s: list[float] = []
    calm_s: list[float] = []
    with Load([mesh.api.port], workload, NUM_STREAMS) as load:
        load.wait_tokens(_RUNNING_TOKENS)
        for _ in range(row.times):
            time.sleep(chance.uniform(0.2, 0.8))
            calm_s.append(time.monotonic())
            time.sleep(chance.uniform(0.2, 0.8))
            faults_s.append(fault(mesh, chance))
            mesh.wait_all_ready()
            row.recoveries_s.append(time.monotonic() - faults_s[-1])
            load.wait_tokens(_RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(mesh.api)
    row.stalls_s, row.calm_s = _stalls_s(streams, faults_s), _stalls_s(streams, calm_s)
    judge(streams, expected, row)


def judge(streams: Sequence[Streamed], expected: Answers, row: Row) -> None:
    """Notes how many requests failed or were answered differently, and fails if any was."""
    failures, changes = failed(streams), changed(streams, expected)
    row.requests += len(streams)
    row.failed += len(failures)
    row.changed += len(changes)
    assert failures == []
    assert changes == []


def _stalls_s(streams: Sequence[Streamed], moments_s: Sequence[float]) -> list[float]:
    stalls = (stall_s(streams, moment_s, HIT_WITHIN_S) for moment_s in moments_s)
    return [stall for stall in stalls if stall is not None]
