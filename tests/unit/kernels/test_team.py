"""The thread team: every chunk once, whoever helps, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.team import (
    parallel_for,
    start_team,
    stop_team,
    team_size,
)
from expertmesh_kernels.linear import linear, pack_linear


@njit
def _count_chunk(counts: NDArray[np.int64], work: NDArray[np.float64], chunk: int) -> None:
    counts[chunk] += 1
    total = 0.0
    for i in range(200 * (chunk % 7)):
        total += i
    work[chunk] = total


@njit
def _count(counts: NDArray[np.int64], work: NDArray[np.float64], forks: int) -> None:
    for _ in range(forks):
        parallel_for(_count_chunk, (counts, work), counts.size)


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    """A team of so many threads, more than there are cores included."""
    start_team(request.param)
    yield request.param
    stop_team()


def _our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "kernel-team" in thread.name]


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 64])
def test_each_chunk_is_computed_once(team: int, chunks: int) -> None:
    """In each of many forks in a row, whether helpers spin, sleep or come late."""
    counts, work = np.zeros(chunks, np.int64), np.zeros(chunks)
    for _ in range(3):
        _count(counts, work, 200)
        time.sleep(0.01)  # long enough for helpers to fall asleep
    assert counts.tolist() == [600] * chunks
    assert team_size() == team


def test_two_threads_may_fork_at_once(team: int) -> None:
    """One gets the helpers, the other computes alone; both are right."""
    counts = [np.zeros(16, np.int64) for _ in range(4)]
    threads = [
        threading.Thread(target=_count, args=(count, np.zeros(16), 500), name=f"caller-{i}")
        for i, count in enumerate(counts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [count.tolist() for count in counts] == [[500] * 16] * 4


def test_the_size_of_the_team_changes_no_bit() -> None:
    """A product is the same alone and shared out."""
    generator = torch.Generator().manual_seed(1)
    packed = pack_linear(torch.randn(5000, 64, generator=generator).bfloat16())
    x_RK = torch.randn(70, 64, generator=generator).bfloat16()
    alone = linear(x_RK, packed)
    start_team(3)
    try:
        assert torch.equal(alone, linear(x_RK, packed))
    finally:
        stop_team()


def test_helpers_end() -> None:
    """A team that is stopped, replaced or never helped leaves no thread."""
    start_team(4)
    assert _our_threads() == ["kernel-team-1", "kernel-team-2", "kernel-team-3"]
    time.sleep(0.01)
    start_team(2)
    assert _our_threads() == ["kernel-team-1"]
    stop_team()
    stop_team()
    assert (_our_threads(), team_size()) == ([], 1)
    with pytest.raises(ValueError, match="a team has 0 threads"):
        start_team(0)
