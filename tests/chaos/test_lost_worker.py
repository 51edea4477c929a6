"""Workers that are killed, hang or starve while others hold copies of their experts."""

from __future__ import annotations

import pytest

from tests.chaos.harness import faults
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.suffering import Traffic, suffer
from tests.chaos.harness.table import Row

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(1800)]

TIMES = 50
EJECTIONS = "moe_dispatch_ejections_total"
LOST = "is unreachable"


def test_kill(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """kill -9 of one of three, again and again."""
    row = Row("kill -9 of 1 of 3", times=TIMES)
    table.append(row)
    suffer(mesh, faults.kill, row, traffic, seed=1)
    assert row.stall_median_s <= 0.050
    assert row.stall_worst_s <= 0.100


def test_hang(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """SIGSTOP of one of three for a while, then SIGCONT: late replies do no harm either."""
    row = Row("SIGSTOP of 1 of 3", times=TIMES)
    table.append(row)
    suffer(mesh, faults.hang, row, traffic, seed=2)
    assert row.stall_worst_s <= 0.250


def test_kill_attention_worker(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """The gateway starts another, which computes from their tokens what requests were at."""
    row = Row("kill -9 of the attention worker", times=10)
    table.append(row)
    suffer(mesh, faults.kill_attention_worker, row, traffic, seed=3, may_refuse=True)


def test_starved(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Other processes take the cores: all is slower, and nobody is taken for dead."""
    row = Row("busy cores for 5 s", times=5)
    table.append(row)
    before, log_before = _ejections(mesh), len(mesh.server.process.stderr)
    suffer(mesh, faults.starve, row, traffic, seed=4)
    ejections = _ejections(mesh) - before
    row.note = f"{ejections:.0f} expert workers taken for dead"
    assert ejections == 0
    assert LOST not in mesh.server.process.stderr[log_before:]


def _ejections(mesh: Mesh) -> float:
    """So far; there is no sample before the first one."""
    return mesh.api.metrics().get(EJECTIONS, 0.0)
