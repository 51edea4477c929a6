"""One of two expert workers becomes slow, and the other holds copies of all its experts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.harness.checks import time_per_token_s
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh, mesh_at
from tests.chaos.harness.pool import expert_pool
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TIMES = 3
SLOW_S = 8.0
SHARE = 0.1
"""Of its time is left to the slow one."""
MOST_TIMES_AS_SLOW = 2.0
"""A call to the slow one would take ten times as long: it is left alone until it is forgiven."""


@pytest.fixture(scope="module")
def pair(tiny_mixtral: Path) -> Iterator[Mesh]:
    """Two expert workers that hold all experts, and their gateway."""
    with expert_pool(tiny_mixtral, ["all"] * 2, ("--dtype", "float32")) as workers:
        addresses = [worker.address for worker in workers]
        with mesh_at(tiny_mixtral, workers, addresses) as mesh:
            yield mesh


def test_slow(pair: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """No request fails and no token changes; how much later tokens come is in the table."""
    row = Row(f"1 of 2 has a tenth of its time, for {SLOW_S:g} s", times=TIMES)
    table.append(row)
    moments_s: list[float] = []
    with Load([pair.api.port], traffic.workload, NUM_STREAMS) as load:
        load.wait_tokens(RUNNING_TOKENS)
        for turn in range(TIMES):
            moments_s.append(time.monotonic())
            time.sleep(SLOW_S)
            moments_s.append(time.monotonic())
            with pair.workers[turn % 2].slowed(SHARE):
                time.sleep(SLOW_S)
        moments_s.append(time.monotonic())
        streams = load.finish()
    judge(streams, traffic.expected, row)
    spans = list(pairwise(moments_s))
    calm, slow = (
        [value for start, end in some for value in time_per_token_s(streams, start, end)]
        for some in (spans[::2], spans[1::2])
    )
    row.note = f"{_p99(calm) * 1e3:.1f} ms a token without, {_p99(slow) * 1e3:.1f} with; p99"
    assert _p99(slow) <= MOST_TIMES_AS_SLOW * _p99(calm)


def _p99(values: Sequence[float]) -> float:
    assert len(values) > NUM_STREAMS, "too few streams were whole: the test shows nothing"
    return sorted(values)[round(0.99 * (len(values) - 1))]
