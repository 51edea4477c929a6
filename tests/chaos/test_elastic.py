"""Expert workers that come and go while a leader moves experts under load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.leading import PLACED_TIMEOUT_S, led_by_gateway, wait_placed
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import doomed_gateway, kill_tree
from tests.chaos.harness.pool import PoolWorker, empty_pool, start_all
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.api import Api
from tests.support.mesh import Server
from tests.support.processes import poll

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TRAFFIC_WITHIN_S = 10.0
TIMES = 3
FLOAT32 = ("--dtype", "float32")


def _join(workers: Sequence[PoolWorker]) -> float:
    """Starts workers without experts; the seconds from readiness to traffic of the last."""
    start_all(workers)
    ready_s = time.monotonic()
    poll(
        lambda: all(worker.state().load.calls > 0 for worker in workers),
        timeout_s=PLACED_TIMEOUT_S,
        what="they take traffic",
    )
    return time.monotonic() - ready_s


def _leave(workers: Sequence[PoolWorker]) -> None:
    """Asks workers to end, all at once; each ends once what it holds is elsewhere."""
    for worker in workers:
        worker.process.process.terminate()
    for worker in workers:
        assert worker.process.wait(PLACED_TIMEOUT_S) == 0, worker.process.stderr


def test_scaling(
    tiny_mixtral: Path,
    traffic: Traffic,
    table: list[Row],
    tmp_path: Path,
) -> None:
    """From two workers to four, to the two that came, to three: no request notices."""
    row = Row("2 -> 4 -> 2 -> 3 workers", times=TIMES)
    table.append(row)
    for _ in range(TIMES):
        with empty_pool(tiny_mixtral, 4, FLOAT32) as workers, ExitStack() as stack:
            start_all(workers[:2])
            server = stack.enter_context(led_by_gateway(tiny_mixtral, workers, tmp_path / "lock"))
            _scale(workers, server, row, traffic)
    row.note = f"traffic after {max(row.recoveries_s):.1f} s"
    assert max(row.recoveries_s) <= TRAFFIC_WITHIN_S


def _scale(
    workers: Sequence[PoolWorker],
    server: Server,
    row: Row,
    traffic: Traffic,
) -> None:
    api = server.api
    wait_placed(api, 2)
    with Load([api.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(RUNNING_TOKENS)
        row.recoveries_s.append(_join(workers[2:]))
        wait_placed(api, 4)
        _leave(workers[:2])
        wait_placed(api, 2)
        load.wait_tokens(RUNNING_TOKENS)
        row.recoveries_s.append(_join(workers[:1]))
        wait_placed(api, 3)
        load.wait_tokens(RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(api)
    row.stalls_s.append(longest_gap_s(streams))
    judge(streams, traffic.expected, row)


def test_rolling_update(
    tiny_mixtral: Path, traffic: Traffic, table: list[Row], tmp_path: Path
) -> None:
    """Each of three workers is told to end, and started again, under load."""
    row = Row("SIGTERM of each of 3 in turn", times=3)
    table.append(row)
    with empty_pool(tiny_mixtral, 3, FLOAT32) as workers, ExitStack() as stack:
        start_all(workers)
        server = stack.enter_context(led_by_gateway(tiny_mixtral, workers, tmp_path / "lock"))
        wait_placed(server.api, 3)
        with Load([server.api.port], traffic.workload, NUM_STREAMS) as load:
            load.wait_tokens(RUNNING_TOKENS)
            for worker in workers:
                _leave([worker])
                row.recoveries_s.append(_join([worker]))
                wait_placed(server.api, 3)
            streams = load.finish()
        wait_idle(server.api)
        row.stalls_s.append(longest_gap_s(streams))
        judge(streams, traffic.expected, row)


def test_leader_killed(
    tiny_mixtral: Path,
    traffic: Traffic,
    table: list[Row],
    tmp_path: Path,
) -> None:
    """kill -9 of the gateway that leads, in the middle of moves: the other one finishes them."""
    row = Row("kill -9 of the leader within a move", times=TIMES)
    table.append(row)
    for _ in range(TIMES):
        with empty_pool(tiny_mixtral, 3, FLOAT32) as workers:
            _kill_leader(tiny_mixtral, workers, tmp_path / "lock", row, traffic)


def _kill_leader(
    model: Path,
    workers: Sequence[PoolWorker],
    lock: Path,
    row: Row,
    traffic: Traffic,
) -> None:
    start_all(workers[:2])
    addresses = [worker.address for worker in workers]
    flags = ("--leader-lock", str(lock))
    with (
        doomed_gateway(model, addresses, *flags, placement="auto") as leader,
        led_by_gateway(model, workers, lock) as follower,
    ):
        wait_placed(leader.api, 2)
        with Load([follower.api.port], traffic.workload, NUM_STREAMS) as load:
            load.wait_tokens(RUNNING_TOKENS)
            start_all(workers[2:])
            poll(lambda: _knows(leader.api, 3), timeout_s=20.0, what="there is a third worker")
            kill_tree(leader.process)
            killed_s = time.monotonic()
            wait_placed(follower.api, 3)
            row.recoveries_s.append(time.monotonic() - killed_s)
            streams = load.finish()
        wait_idle(follower.api)
        judge(streams, traffic.expected, row)


def _knows(api: Api, num_workers: int) -> bool:
    return len(api.get("/admin/placement").json["workers"]) == num_workers
