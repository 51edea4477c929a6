"""A synthetic day of load through the autoscaler: it follows, and does not oscillate."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scaling_day.cluster import PLACEMENT
from bench.scaling_day.day import NUM_BURSTS, make_day, read_day
from bench.scaling_day.figure import FIGURE, draw, table
from bench.scaling_day.run import POLICY, SETTLED_S, DayResult, run_day

DOC = Path(__file__).parents[4] / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def day() -> DayResult:
    """The committed day."""
    return run_day(read_day())


def test_the_committed_day_is_that_of_its_generator() -> None:
    """And another seed makes another one."""
    assert read_day() == make_day()
    assert read_day() != make_day(seed=8)


def test_it_does_not_oscillate(day: DayResult) -> None:
    """The direction changes at most twice for each burst and for the day itself."""
    assert day.writes
    assert day.reversals <= 2 * (NUM_BURSTS + 1)
    assert day.flaps == 0


def test_limits_and_coverage(day: DayResult) -> None:
    """Every expert has its copies all day long, and the number stays within its limits."""
    settled = [step for step in day.steps if step.at_s > SETTLED_S]
    assert min(step.fewest_copies for step in settled) >= PLACEMENT.min_copies
    numbers = {step.desired for step in day.steps}
    assert POLICY.min_workers <= min(numbers)
    assert max(numbers) <= POLICY.max_workers
    assert not day.report.errors


def test_it_follows_the_load(day: DayResult) -> None:
    """Work waits in bursts at most, and far fewer expert workers run than the peak needs."""
    assert day.share_waiting(POLICY.wait_high_s) < 0.05
    most = max(step.desired for step in day.steps)
    assert day.worker_hours < 0.75 * 24 * most


def test_the_documentation_shows_this_day(day: DayResult) -> None:
    """Figure and table are made by `python -m bench.scaling_day`."""
    assert FIGURE.read_text("utf-8") == draw(day)
    assert table(day) in DOC.read_text("utf-8")
