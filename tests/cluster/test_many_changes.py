"""The changes of `test_kubectl.py` again and again, and what takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.suffering import Traffic
from tests.cluster.changes import (
    change_pods,
    drain_node,
    restart_gateway,
    sit_out_outage,
    under_load,
)
from tests.cluster.deployed import Deployed, deployed, timed

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(1800)]

CYCLES = 5

Times = dict[str, float]


@pytest.fixture(scope="module")
def mesh(tiny_mixtral: Path, times: Times) -> Iterator[Deployed]:
    """A gateway and two expert workers."""
    with deployed(tiny_mixtral, times) as running:
        yield running


def test_many_changes(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """0 failed requests and 0 changed answers over all cycles."""
    with timed(times, f"{CYCLES} cycles"), under_load(mesh, traffic, times) as load:
        for cycle in range(CYCLES):
            change_pods(mesh, load, times, f"cycle {cycle + 1}: ")


def test_drain_node(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """An expert worker is evicted, hands over first, and comes again on another node."""
    with under_load(mesh, traffic, times) as load, timed(times, "drain a node"):
        drain_node(mesh, load)


def test_restart_gateway(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """Streams of the old gateway come to their end, and all later ones go to the new one."""
    with under_load(mesh, traffic, times) as load, timed(times, "rollout restart of the gateway"):
        restart_gateway(mesh, load)


def test_long_outage(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """A minute without the API: the last view serves, and soon afterwards the truth is known."""
    with under_load(mesh, traffic, times) as load:
        sit_out_outage(mesh, load, times)
