"""Expert workers that the kernel ends, since the memory of their cgroup has run out."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.chaos.harness import memory_group
from tests.chaos.harness.load import Load
from tests.chaos.harness.memory_group import MemoryGroup
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.pool import start_all
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge, suffer
from tests.chaos.harness.table import Row
from tests.support.mesh import Server, serve
from tests.support.processes import poll, processes_of

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TIMES = 10
NUM_LIVES = 3
TOO_LITTLE_BYTES = 24 << 20
WORST_S = 0.1
MEDIAN_S = 0.05
TIMEOUT_S = 60.0


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """An empty cgroup."""
    if reason := memory_group.why_not():
        pytest.skip(reason)
    with memory_group.memory_group() as made:
        yield made


def test_out_of_memory(group: MemoryGroup, mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """The kernel ends one of three under load: clients notice as little as of kill -9."""
    row = Row("out of memory, 1 of 3", times=TIMES)
    table.append(row)
    victim = mesh.workers[0]

    def run_out(mesh: Mesh, chance: random.Random) -> float:
        at_s = time.monotonic()
        group.run_out()
        assert victim.process.wait(TIMEOUT_S) == -signal.SIGKILL
        revive()
        return at_s

    def revive() -> None:
        victim.start()
        group.add(victim.pid)
        victim.wait_ready()

    victim.stop()
    revive()
    mesh.wait_all_ready()
    suffer(mesh, run_out, row, traffic, seed=41)
    victim.stop()
    start_all([victim])
    mesh.wait_all_ready()
    assert row.stall_median_s <= MEDIAN_S
    assert row.stall_worst_s <= WORST_S


def test_out_of_memory_again_and_again(
    group: MemoryGroup, tiny_mixtral: Path, traffic: Traffic, table: list[Row]
) -> None:
    """`serve` starts such an expert worker again after longer and longer pauses, says why, and
    answers meanwhile.
    """
    row = Row("out of memory at each start", times=NUM_LIVES)
    table.append(row)
    with (
        serve(tiny_mixtral, "--log-format", "text", expert_workers=2) as server,
        Load([server.api.port], traffic.workload, NUM_STREAMS) as load,
    ):
        load.wait_tokens(RUNNING_TOKENS)
        ends_s = _end_lives(server, group)
        load.wait_tokens(RUNNING_TOKENS)
        poll(lambda: _num_ready(server) == 2, timeout_s=TIMEOUT_S, what="it serves again")
        load.wait_tokens(RUNNING_TOKENS)
        judge(load.finish(), traffic.expected, row)
        log = server.process.stderr
    pauses_s = [later - earlier for earlier, later in pairwise(ends_s)]
    row.note = f"{', '.join(f'{pause_s:.1f}' for pause_s in pauses_s)} s between ends"
    for pause_s, planned_s in zip(pauses_s, (1.0, 2.0), strict=True):
        assert pause_s >= planned_s
    for planned_s in (1, 2, 4):
        assert f"was killed by SIGKILL; starting it again in {planned_s} s" in log


def _end_lives(server: Server, group: MemoryGroup) -> list[float]:
    """When each of some lives of an expert worker came to its end: the first one is killed, as it
    has all memory that it needs; later ones have too little to start.
    """
    victim, *others = _expert_workers(server)
    victim.kill()
    victim.wait(TIMEOUT_S)
    ends_s = [time.monotonic()]
    known = {worker.pid for worker in others}
    for _ in range(NUM_LIVES - 1):
        poll(lambda: _unknown(server, known) != [], timeout_s=TIMEOUT_S, what="it starts")
        (victim,) = _unknown(server, known)
        group.add(victim.pid)
        with group.limited_to(TOO_LITTLE_BYTES):
            victim.wait(TIMEOUT_S)
        ends_s.append(time.monotonic())
    return ends_s


def _unknown(server: Server, known: set[int]) -> list[psutil.Process]:
    return [worker for worker in _expert_workers(server) if worker.pid not in known]


def _expert_workers(server: Server) -> list[psutil.Process]:
    return [
        process
        for process in processes_of(server.process.marker)
        if "expert_worker" in process.cmdline()
    ]


def _num_ready(server: Server) -> int:
    workers = server.api.ready().json["workers"]
    return sum(worker["state"] == "ready" for worker in workers)
