"""Expert workers that are killed or hang while others hold copies of their experts."""

from __future__ import annotations

import random
import time

import pytest

from tests.chaos.harness.checks import Answers
from tests.chaos.harness.mesh import Mesh, suffer
from tests.chaos.harness.pool import in_background
from tests.chaos.harness.requests import Workload
from tests.chaos.harness.sizes import Size, sizes
from tests.chaos.harness.table import Row

pytestmark = pytest.mark.alone

HANG_S = 2.0


def _kill(mesh: Mesh, chance: random.Random) -> float:
    victim = chance.choice(mesh.workers)
    at_s = time.monotonic()
    victim.kill()
    victim.start()
    victim.wait_ready()
    return at_s


def _kill_and_start_in_background(mesh: Mesh, chance: random.Random) -> float:
    with in_background():
        return _kill(mesh, chance)


def _hang(mesh: Mesh, chance: random.Random) -> float:
    at_s = time.monotonic()
    chance.choice(mesh.workers).hang(HANG_S)
    return at_s


@sizes(short=1, full=50)
def test_kill(
    size: Size, mesh: Mesh, workload: Workload, expected: Answers, table: list[Row]
) -> None:
    """kill -9 of one of three, again and again: no request fails, no token changes."""
    row = Row("kill -9 of 1 of 3", times=size.times)
    table.append(row)
    fault = _kill_and_start_in_background if size.measured else _kill
    suffer(mesh, fault, row, workload, expected, seed=1)
    if size.measured:
        assert row.stall_median_s <= 0.050
        assert row.stall_worst_s <= 0.100


@sizes(short=1, full=50)
def test_hang(
    size: Size, mesh: Mesh, workload: Workload, expected: Answers, table: list[Row]
) -> None:
    """SIGSTOP of one of three for a while, then SIGCONT: the same, and late replies do no harm."""
    row = Row("SIGSTOP of 1 of 3", times=size.times)
    table.append(row)
    suffer(mesh, _hang, row, workload, expected, seed=2)
    if size.measured:
        assert row.stall_worst_s <= 0.250
