"""An expert worker that takes the time of a device."""

from __future__ import annotations

import time

import numpy as np
import torch

from bench.timed_expert_worker import timed


def test_time_is_that_of_activated_experts() -> None:
    """Never less than the model says, for each expert once; outputs are zeros, one a pair."""
    compute = timed(0.002, 0.004)
    rows_N, experts_N = np.array([0, 0, 1]), np.array([3, 5, 3])
    began_s = time.monotonic()
    outputs_NH = compute(torch.ones(2, 4, dtype=torch.bfloat16), rows_N, experts_N, None, None)
    assert time.monotonic() - began_s >= 0.010
    assert torch.equal(outputs_NH, torch.zeros(3, 4, dtype=torch.bfloat16))
