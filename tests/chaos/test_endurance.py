"""What many faults cost in all: tokens, descriptors, threads, memory, ports."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from tests.chaos.harness import faults, orders
from tests.chaos.harness.checks import Footprint, tokens_between, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh, mesh_at
from tests.chaos.harness.pool import expert_pool
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.mesh import serve
from tests.support.processes import port_is_free, processes_of
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(1200)]

NUM_KILLS, PERIOD_S = 30, 10.0
UNDISTURBED_S = 60.0
KEPT_SHARE = 0.95
NUM_CYCLES = 50
NUM_TURNS, TURN_REQUESTS = 10, 48
MOST_COST = 0.03
MOST_GROWTH_MIB = 64.0


def test_throughput_under_kills(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """A kill every 10 s for 5 minutes keeps 95 % of the tokens, and nothing grows meanwhile."""
    row = Row("a kill every 10 s for 5 minutes", times=NUM_KILLS)
    table.append(row)
    survivors = processes_of(mesh.server.process.marker)
    chance = random.Random(9)
    with Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(RUNNING_TOKENS)
        before = Footprint(survivors)
        spans_s = [
            _span_s(lambda: time.sleep(UNDISTURBED_S)),
            _span_s(lambda: _kill_again_and_again(mesh, chance)),
            _span_s(lambda: time.sleep(UNDISTURBED_S)),
        ]
        streams = load.finish()
    wait_idle(mesh.api)
    first, disturbed, last = (
        tokens_between(streams, start_s, end_s) / (end_s - start_s) for start_s, end_s in spans_s
    )
    kept = disturbed / ((first + last) / 2)
    period_s = (spans_s[1][1] - spans_s[1][0]) / NUM_KILLS
    growth = before.growth()
    row.note = (
        f"{kept:.1%} of the tokens, a kill each {period_s:.1f} s;"
        f" growth (fds, threads, MiB): {growth}"
    )
    judge(streams, traffic.expected, row)
    assert kept >= KEPT_SHARE
    assert period_s <= 1.1 * PERIOD_S
    for num_fds, num_threads, mib in growth:
        assert num_fds <= 0
        assert num_threads <= 0
        assert mib <= MOST_GROWTH_MIB


def _kill_again_and_again(mesh: Mesh, chance: random.Random) -> None:
    start_s = time.monotonic()
    for number in range(1, NUM_KILLS + 1):
        faults.kill(mesh, chance)
        mesh.wait_all_ready()
        time.sleep(max(0.0, start_s + number * PERIOD_S - time.monotonic()))


def _span_s(act: Callable[[], None]) -> tuple[float, float]:
    start_s = time.monotonic()
    act()
    return start_s, time.monotonic()


def test_cost_of_protection(tiny_mixtral: Path, traffic: Traffic, table: list[Row]) -> None:
    """Choosing among copies and watching every call cost at most 3 %, where nothing fails.

    The same two workers hold one copy of each expert, where there is nothing to choose and nobody
    else to ask, and two, in turn.
    """
    row = Row("none, two copies against one", times=NUM_TURNS)
    table.append(row)
    everything = orders.all_pairs(MIXTRAL)
    half = frozenset((layer, expert) for layer, expert in everything if expert % 2)
    placements = {1: (half, everything - half), 2: (everything, everything)}
    rates: dict[int, list[float]] = {1: [], 2: []}
    with expert_pool(tiny_mixtral, ("0/2", "1/2"), ("--dtype", "float32")) as workers:
        addresses = [worker.address for worker in workers]
        with mesh_at(tiny_mixtral, workers, addresses) as mesh:
            for _ in range(NUM_TURNS):
                for num_copies, placement in placements.items():
                    orders.place(mesh, placement)
                    rates[num_copies].append(_tokens_per_s(mesh, traffic))
    ratio = median(two / one for one, two in zip(rates[1], rates[2], strict=True))
    row.note = f"{ratio:.3f} of the tokens per second"
    assert ratio >= 1 - MOST_COST


def _tokens_per_s(mesh: Mesh, traffic: Traffic) -> float:
    with Load([mesh.api.port], traffic.workload, NUM_STREAMS, count=TURN_REQUESTS) as load:
        streams = load.wait()
    times_s = sorted(time_s for stream in streams for time_s in stream.times_s)
    return len(times_s) / (times_s[-1] - times_s[0])


def test_start_and_stop(tiny_mixtral: Path, traffic: Traffic, table: list[Row]) -> None:
    """Fifty times: it starts, serves, ends with 0, and leaves no process and no port."""
    row = Row("start and stop of serve", times=NUM_CYCLES)
    table.append(row)
    body = {**traffic.workload.body(1), "stream": False}
    for _ in range(NUM_CYCLES):
        with serve(tiny_mixtral, expert_workers=2) as server:
            ports = server.ports
            answer = server.api.post("/v1/completions", body)
            row.requests += 1
            assert answer.status == 200, answer.body
        assert [port for port in ports if not port_is_free(port)] == []
