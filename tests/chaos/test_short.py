"""Each kind of fault once, at whatever speed: what `make test` runs of the chaos suite.

No request may fail and no token may change. `make chaos` has the same faults many times, with
limits for what clients notice, and more that takes longer.
"""

from __future__ import annotations

import pytest

from tests.chaos.harness import faults
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.replies import WRONG_REPLIES
from tests.chaos.harness.suffering import Traffic, suffer
from tests.chaos.harness.table import Row

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("kill -9 of 1 of 3", faults.kill, id="kill"),
        pytest.param("SIGSTOP of 1 of 3", faults.hang, id="hang"),
        pytest.param("network cut, 1 of 3", faults.cut, id="cut"),
        pytest.param("connections reset, 1 of 3", faults.reset, id="reset"),
        pytest.param("connection lost within a reply, 1 of 3", faults.break_in_a_reply, id="break"),
        pytest.param(
            "calls with a bit flipped, 1 of 3", faults.flipped_requests(direct=True), id="flip"
        ),
    ],
)
def test_one_of_three(
    name: str, fault: faults.Fault, networked: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """Something happens to one of three expert workers with two copies of each expert."""
    row = Row(name, times=1)
    table.append(row)
    suffer(networked, fault, row, traffic, seed=1)


def test_wrong_replies(networked: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """One of three answers wrongly, in every way once."""
    names = [name for name in WRONG_REPLIES if name != "lost"]
    row = Row("wrong replies, 1 of 3", times=len(names))
    table.append(row)
    suffer(networked, faults.wrong_replies(names, direct=True), row, traffic, seed=2)


def test_two_of_three(networked: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Two of three are killed: streams pause until experts are there again."""
    row = Row("kill -9 of 2 of 3, a second apart", times=1)
    table.append(row)
    suffer(networked, faults.kill_two, row, traffic, seed=3, may_refuse=True)
