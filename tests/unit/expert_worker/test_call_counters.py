"""What is counted of calls."""

from __future__ import annotations

import numpy as np
import pytest

from expert_worker.call_counters import CallCounters
from expertmesh.call_waits import WAIT_BOUNDS_S


def test_calls_by_the_time_that_they_waited() -> None:
    """Those of compiled code, which are counted as work alone, have not waited."""
    counters = CallCounters(num_layers=2, num_experts=4)
    experts_N = np.array([0, 3], np.int64)
    for queue_s in (0.0, WAIT_BOUNDS_S[2], 1.5 * WAIT_BOUNDS_S[2], 100.0):
        counters.count(1, 2, experts_N, 50, queue_s)
    counters.work += (3, 3, 3, 30)
    total = CallCounters(num_layers=2, num_experts=4)
    total.add(counters)
    waits = total.calls_by_wait
    assert {n: count for n, count in enumerate(waits.tolist()) if count} == {
        0: 4, 2: 1, 3: 1, len(WAIT_BOUNDS_S): 1,
    }  # fmt: skip
    assert total.queue_s == pytest.approx(100 + 2.5 * WAIT_BOUNDS_S[2])
