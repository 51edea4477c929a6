"""Membership, placement, orders and dispatch in virtual time, under seeded schedules of faults.

At every step: an expert is covered or reported as uncovered; nobody is asked for what it does not
hold, by whoever can know; no row is lost or added up twice; no order takes the last copy; slots are
kept to. And in the end all that was moved is where it should be, and stays there.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from gateway.placement import orders
from tests.chaos.simulation import dispatch, expert_worker
from tests.chaos.simulation.schedule import Outcome, run_schedule

_SEEDS_PER_TEST = 100
_MOST_SEEDS = 30


def _run(seeds: range) -> list[Outcome]:
    outcomes = [run_schedule(seed) for seed in seeds]
    for outcome in outcomes:
        assert not outcome.violations, f"seed {outcome.seed}: {outcome.violations}"
    return outcomes


def test_some_schedules() -> None:
    """Nothing happens that must not; each kind of fault was there, and work was done."""
    outcomes = _run(range(40))
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    assert len(faults) == 13
    assert sum(outcome.num_orders for outcome in outcomes) > 1000
    assert sum(outcome.num_retries for outcome in outcomes) > 100
    assert median(outcome.num_steps for outcome in outcomes) > 300


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(0, 1000, _SEEDS_PER_TEST))
def test_a_thousand_schedules(first: int) -> None:
    """The same, with many more seeds."""
    _run(range(first, first + _SEEDS_PER_TEST))


def test_the_same_seed_is_the_same_schedule() -> None:
    """A seed that failed can be looked at again."""
    assert run_schedule(7) == run_schedule(7)


@pytest.mark.parametrize("mistake", ["unload the last copy", "free at once", "add up twice"])
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """With a rule broken, a few schedules are enough to see it."""
    if mistake == "unload the last copy":
        monkeypatch.setattr(orders._Copies, "elsewhere", lambda *_: 99)
        expected = "gives up the last copy"
    elif mistake == "free at once":
        monkeypatch.setattr(expert_worker, "RETIRE_S", 0.0)
        expected = "asks w"
    else:
        monkeypatch.setattr(dispatch._Step, "is_answered", lambda *_: False)
        expected = "a step has"
    outcomes = (run_schedule(seed) for seed in range(_MOST_SEEDS))
    assert any(expected in text for outcome in outcomes for text in outcome.violations)
