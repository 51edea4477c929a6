"""Expert workers that are gone together, with all copies of experts: streams pause and go on."""

from __future__ import annotations

import time

import pytest

from tests.chaos.harness import faults
from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.pool import start_all
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge, suffer
from tests.chaos.harness.table import Row
from tests.support.processes import poll

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

REFUSED_WITHIN_S = 0.05
GONE_S = 5.0
TIMES = 10


def test_all_gone(mesh: Mesh, long_traffic: Traffic, table: list[Row]) -> None:
    """kill -9 of all three; some seconds later they are back. No stream fails, no token changes."""
    row = Row(f"all 3 gone for {GONE_S:g} s", times=TIMES)
    table.append(row)
    refused_s = [_lose_all(mesh, row, long_traffic) for _ in range(TIMES)]
    row.note = f"new requests refused within {max(refused_s) * 1e3:.0f} ms"
    assert max(refused_s) <= REFUSED_WITHIN_S


def _lose_all(mesh: Mesh, row: Row, traffic: Traffic) -> float:
    """The longest time in which a new request was refused."""
    with Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(RUNNING_TOKENS)
        for worker in mesh.workers:
            worker.kill()
        poll(lambda: mesh.api.ready().status == 503, timeout_s=10.0, what="/ready is 503")
        refused_s = max(_refused_s(mesh, traffic) for _ in range(5))
        time.sleep(GONE_S)
        start_all(mesh.workers)
        listening_s = time.monotonic()
        mesh.wait_all_ready()
        load.wait_tokens(RUNNING_TOKENS)
        row.recoveries_s.append(time.monotonic() - listening_s)
        streams = load.finish()
    wait_idle(mesh.api)
    assert longest_gap_s(streams) > GONE_S, "no stream was open: the test shows nothing"
    judge(streams, traffic.expected, row)
    return refused_s


def _refused_s(mesh: Mesh, traffic: Traffic) -> float:
    started_s = time.monotonic()
    answer = mesh.api.post("/v1/completions", traffic.workload.body(0))
    took_s = time.monotonic() - started_s
    assert answer.status == 503, answer.body
    assert answer.error["code"] == "expert_unavailable"
    assert float(answer.headers["retry-after"]) > 0
    return took_s


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("kill -9 of 2 of 3, a second apart", faults.kill_two, id="kill two"),
        pytest.param("kill -9 and SIGSTOP, 2 of 3", faults.kill_and_hang, id="kill and hang"),
    ],
)
def test_two_faults(
    name: str, fault: faults.Fault, mesh: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """Two of three fail at once: some experts have no copy for a while."""
    row = Row(name, times=TIMES)
    table.append(row)
    suffer(mesh, fault, row, traffic, seed=9, may_refuse=True)
