"""A network that is cut, breaks connections or slows down, in front of one of three workers."""

from __future__ import annotations

import pytest

from tests.chaos.harness import faults
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.suffering import Traffic, suffer
from tests.chaos.harness.table import Row

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("name", "fault", "times", "worst_s"),
    [
        pytest.param("network cut", faults.cut, 50, 0.25, id="cut"),
        pytest.param("connections reset", faults.reset, 20, 0.1, id="reset"),
        pytest.param(
            "connection lost within a reply", faults.break_in_a_reply, 20, 0.1, id="break"
        ),
        pytest.param("100 ms of latency each way", faults.delay, 10, 0.25, id="latency"),
        pytest.param("100 kB/s", faults.throttle, 10, 0.25, id="bandwidth"),
    ],
)
def test_network(
    name: str,
    fault: faults.Fault,
    times: int,
    worst_s: float,
    networked: Mesh,
    traffic: Traffic,
    table: list[Row],
) -> None:
    """Whatever a network does to one of three, no request fails and no token changes."""
    row = Row(f"{name}, 1 of 3", times=times)
    table.append(row)
    suffer(networked, fault, row, traffic, seed=5)
    assert row.stall_worst_s <= worst_s
