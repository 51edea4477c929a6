"""Sampling in Triton: the tokens that the reference picks, for the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expertmesh_kernels.sampling import sample_reference
from expertmesh_kernels.triton import sampling
from expertmesh_kernels.triton.ops import run_sample
from tests.unit.kernels.triton.test_small import random

ROWS = 14


@pytest.mark.parametrize("chunk", [1024, 64])
def test_picks_the_tokens_of_the_reference(
    chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mix of settings, logits with ties, in one chunk or several; a row alone likewise."""
    monkeypatch.setattr(sampling, "_CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    logits_SV = (random(ROWS, 150) * 3).round(decimals=1)
    settings = (
        rng.choice([0, 0.5, 1, 2], ROWS).astype(np.float32),
        rng.choice([0, 0.01, 0.3, 1], ROWS).astype(np.float32),
        rng.choice([1, 0.95, 0.5, 0], ROWS).astype(np.float32),
        rng.choice([0, 1, 5, 50, 1000], ROWS).astype(np.int32),
        rng.integers(0, 2**64, ROWS, np.uint64),
        rng.integers(0, 10_000, ROWS),
    )
    expected = sample_reference(logits_SV, *settings)
    actual = run_sample(logits_SV.to(device), *settings)
    np.testing.assert_array_equal(actual, expected)
    alone = run_sample(logits_SV[5:6].to(device), *(setting[5:6] for setting in settings))
    np.testing.assert_array_equal(alone, expected[5:6])


def test_logits_that_are_not_finite(device: torch.device) -> None:
    """NaN counts as -inf; a row without a finite maximum gives the lowest of its largest."""
    nan, inf = float("nan"), float("inf")
    logits_SV = torch.tensor(
        [
            [nan, 1.0, 2.0, nan],
            [nan, -inf, nan, -inf],
            [0.0, inf, 3.0, inf],
            [nan, nan, nan, nan],
            [-inf, -5.0, -inf, nan],
        ]
    )
    for temperature in (0.0, 1.0, nan):
        settings = (
            np.full(5, temperature, np.float32), np.full(5, nan, np.float32),
            np.ones(5, np.float32), np.zeros(5, np.int32), np.zeros(5, np.uint64), np.arange(5),
        )  # fmt: skip
        expected = sample_reference(logits_SV, *settings)
        np.testing.assert_array_equal(run_sample(logits_SV.to(device), *settings), expected)
