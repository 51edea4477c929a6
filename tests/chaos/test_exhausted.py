"""Processes that can open no more descriptors, and logs that take no more lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness import faults
from tests.chaos.harness.mesh import NUM_COPIES, NUM_WORKERS, Mesh, mesh_at
from tests.chaos.harness.pool import EXPERT_WORKER, expert_pool, shares_with_copies
from tests.chaos.harness.suffering import Traffic, suffer
from tests.chaos.harness.table import Row
from tests.support.mesh import COMMAND
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TIMES = 5
WORST_S = 0.25
FULL_PIPE = """
import os, sys
reading, writing = os.pipe()
os.set_inheritable(reading, True)
os.set_blocking(writing, False)
try:
    while True:
        os.write(writing, b"x")
except BlockingIOError:
    os.set_blocking(writing, True)
os.dup2(writing, 2)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
FULL_DISK = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_descriptors_of_a_worker(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Strangers take all descriptors of one of three: whoever is connected already goes on."""
    row = Row(f"no descriptors, 1 of 3, for {faults.EXHAUSTED_S:g} s", times=TIMES)
    table.append(row)
    suffer(mesh, faults.exhaust_worker, row, traffic, seed=51)


def test_descriptors_of_the_gateway(mesh: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Strangers take all of its: new connections are answered 503, and streams go on."""
    row = Row(f"no descriptors, the gateway, for {faults.EXHAUSTED_S:g} s", times=TIMES)
    table.append(row)
    suffer(mesh, faults.exhaust_gateway, row, traffic, seed=51, may_refuse=True)
    assert row.refused > 0, "nobody came meanwhile: the test shows nothing"


@pytest.fixture(params=[pytest.param(FULL_PIPE, id="pipe"), pytest.param(FULL_DISK, id="disk")])
def unlogged(request: pytest.FixtureRequest, tiny_mixtral: Path) -> Iterator[Mesh]:
    """Three expert workers with two copies of each expert, and a gateway, without room for logs."""
    shares = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
    full = ("-c", request.param)
    with expert_pool(
        tiny_mixtral, shares, ("--dtype", "float32"), program=(*full, *EXPERT_WORKER)
    ) as workers:
        addresses = [worker.address for worker in workers]
        with mesh_at(tiny_mixtral, workers, addresses, program=(*full, *COMMAND)) as mesh:
            yield mesh


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("kill -9 of 1 of 3", faults.kill, id="kill"),
        pytest.param("SIGSTOP of 1 of 3", faults.hang, id="hang"),
    ],
)
def test_full_log(
    name: str, fault: faults.Fault, unlogged: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """No process can log anything: faults, of which all have to tell, cost what they always do."""
    row = Row(f"{name}, logs are full", times=TIMES)
    table.append(row)
    suffer(unlogged, fault, row, traffic, seed=52)
    assert row.stall_worst_s <= WORST_S
