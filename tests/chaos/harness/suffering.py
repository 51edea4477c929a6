"""Faults that hit a mesh while streams are open, and what came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.harness.checks import Answers, changed, failed, stall_s, wait_idle
from tests.chaos.harness.faults import Fault
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.streams import Streamed, Workload, answers_alone
from tests.chaos.harness.table import Row
from tests.support.mesh import gateway

NUM_STREAMS = 8
HIT_WITHIN_S = 0.1
"""A worker of which nothing was wanted for so long was not hit."""
RUNNING_TOKENS = 100
"""Enough for all streams to be open."""
_CALM_S = (0.2, 0.8)


@dataclass(frozen=True)
class Traffic:
    """Requests and what they must be answered."""

    workload: Workload
    expected: Answers

    @classmethod
    def to(cls, model: Path, workload: Workload) -> Traffic:
        """What one process in which nothing fails answers to each request, alone."""
        with gateway(model, ["local"]) as server:
            return cls(workload, answers_alone(server.api.port, workload))


def suffer(
    mesh: Mesh, fault: Fault, row: Row, traffic: Traffic, *, seed: int, may_refuse: bool = False
) -> None:
    """Has a fault hit `row.times` times at random moments while streams are open.

    Fails if a request fails or is answered differently. All that clients saw is in the row.

    Args:
        mesh: Serves.
        fault: What happens.
        row: What was seen is put here.
        traffic: What is asked.
        seed: Of the moments, and for the fault's own choices.
        may_refuse: New requests may be answered 503 meanwhile; they are not counted.
    """
    chance = random.Random(seed)
    faults_s: list[float] = []
    calm_s: list[float] = []
    with Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(RUNNING_TOKENS)
        for _ in range(row.times):
            time.sleep(chance.uniform(*_CALM_S))
            calm_s.append(time.monotonic())
            time.sleep(chance.uniform(*_CALM_S))
            faults_s.append(fault(mesh, chance))
            mesh.wait_all_ready()
            row.recoveries_s.append(time.monotonic() - faults_s[-1])
            load.wait_tokens(RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(mesh.api)
    if may_refuse:
        served = [stream for stream in streams if stream.status != 503]
        row.refused, streams = len(streams) - len(served), served
    row.stalls_s, row.calm_s = _stalls_s(streams, faults_s), _stalls_s(streams, calm_s)
    judge(streams, traffic.expected, row)


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
