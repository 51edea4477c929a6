"""When more or fewer expert workers are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gateway.scaling.policy import Decision, Fleet, Sample, ScalingPolicy, decide

POLICY = ScalingPolicy(min_workers=2, max_workers=8)
STEP_S = 5.0
FOUR = Fleet(desired=4, present=4)


def samples(
    *parts: tuple[float, float], wait_s: float = 0.0, desired: int = 4, present: int | None = None
) -> list[Sample]:
    """So many seconds of such a busy share, one part after the other, up to time 0."""

    def make() -> Iterator[Sample]:
        at_s = -sum(seconds for seconds, _ in parts)
        for seconds, busy in parts:
            for _ in range(round(seconds / STEP_S)):
                at_s += STEP_S
                here = desired if present is None else present
                yield Sample(at_s, desired, here, busy, wait_s)

    return list(make())


def after(history: list[Sample], fleet: Fleet = FOUR, policy: ScalingPolicy = POLICY) -> Decision:
    """What follows from it at time 0."""
    return decide(history, fleet, policy, 0.0)


def what(decision: Decision) -> tuple[str, str, int]:
    """Without the words."""
    return decision.direction, decision.reason, decision.num_workers


def test_busy_for_a_minute() -> None:
    """As many are asked for as bring the share down to the aim; not before the minute is over."""
    assert what(after(samples((300, 0.5), (55, 0.8)))) == ("stay", "steady", 4)
    assert what(after(samples((300, 0.5), (60, 0.8)))) == ("up", "busy", 6)  # 3.2 / 0.55
    assert what(after(samples((300, 0.5), (60, 1.0)))) == ("up", "busy", 8)
    assert "busy for 80%" in after(samples((65, 0.8))).why
    assert what(after(samples((60, 0.9), (5, 0.6), (55, 0.9)))) == ("stay", "steady", 4)
    assert what(after([])) == ("stay", "steady", 4)


def test_those_that_boot_are_subtracted() -> None:
    """What was asked for is not asked for again; load that goes beyond it is."""
    booting = replace(FOUR, desired=6)
    assert what(after(samples((65, 0.8), desired=6, present=4), booting)) == ("stay", "booting", 6)
    assert what(after(samples((65, 1.0), desired=6, present=4), booting)) == ("up", "busy", 8)
    waits = samples((65, 0.5), wait_s=0.2, desired=6, present=4)
    assert what(after(waits, booting)) == ("stay", "booting", 6)


def test_a_change_begins_the_time_anew() -> None:
    """Be it that others were asked for or that some came; not if one was lost."""
    arrived = Fleet(desired=5, present=5)
    before, now = samples((60, 0.9)), samples((30, 0.9), desired=5, present=5)
    shifted = [replace(sample, at_s=sample.at_s - 30) for sample in before]
    assert what(after([*shifted, *now], arrived)) == ("stay", "steady", 5)
    waiting = [replace(sample, desired=5) for sample in shifted]
    assert what(after([*waiting, *now], arrived)) == ("stay", "steady", 5)
    there = [replace(sample, present=5) for sample in waiting]
    lost = [replace(sample, present=4) for sample in now]
    assert what(after([*there, *lost], replace(arrived, present=4))) == ("up", "busy", 8)


def test_waits_ask_for_one_more_early() -> None:
    """Before devices are busy on the mean, but not if they are idle."""
    assert what(after(samples((20, 0.5), wait_s=0.06))) == ("up", "queue_wait", 5)
    assert what(after(samples((10, 0.5), wait_s=0.06))) == ("stay", "steady", 4)
    assert what(after(samples((20, 0.5), wait_s=0.04))) == ("stay", "steady", 4)
    assert what(after(samples((20, 0.2), wait_s=0.06))) == ("stay", "steady", 4)


def test_idle_for_ten_minutes() -> None:
    """One goes, never more; waits and a single busy sample keep it."""
    assert what(after(samples((605, 0.29)))) == ("down", "idle", 3)
    assert what(after(samples((605, 0.0)))) == ("down", "idle", 3)
    assert what(after(samples((600, 0.1)))) == ("stay", "steady", 4)
    assert what(after(samples((605, 0.1), wait_s=0.06))) == ("stay", "steady", 4)
    assert what(after(samples((300, 0.1), (5, 0.4), (300, 0.1)))) == ("stay", "steady", 4)


def test_one_that_was_lost_begins_the_idle_time_anew() -> None:
    """With fewer, the share of the others may still rise."""
    before = [replace(sample, at_s=sample.at_s - 300) for sample in samples((305, 0.1))]
    history = [*before, *samples((300, 0.1), present=3)]
    assert what(after(history, replace(FOUR, present=3))) == ("stay", "steady", 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"can_shrink": False}, "copies"), ({"num_uncovered": 3}, "uncovered")],
)
def test_nobody_goes_where_copies_would_be_lacking(change: dict[str, int], reason: str) -> None:
    """However idle they are."""
    idle, fleet = samples((605, 0.0)), replace(FOUR, **change)
    assert what(after(idle, fleet)) == ("stay", reason, 4)
    above = replace(fleet, desired=9, present=9)
    assert what(after(samples((5, 0.5), desired=9), above)) == ("stay", reason, 9)


def test_limits() -> None:
    """Neither below the least nor above the most, and back between them at once."""
    assert what(after(samples((605, 0.0), desired=2), Fleet(2, 2))) == ("stay", "steady", 2)
    assert what(after([], Fleet(1, 1))) == ("up", "minimum", 2)
    assert what(after([], Fleet(2, 2, num_for_copies=5))) == ("up", "copies", 5)
    assert what(after([], Fleet(2, 2, num_for_copies=50))) == ("up", "copies", 8)
    assert what(after([], Fleet(9, 9))) == ("down", "maximum", 8)
    assert what(after([], Fleet(11, 11))) == ("down", "maximum", 10)
    busy = samples((65, 0.9), desired=7)
    assert what(after(busy, Fleet(7, 7))) == ("up", "busy", 8)
    assert what(after(samples((65, 0.9), desired=8), Fleet(8, 8))) == ("stay", "maximum", 8)
    assert what(after(samples((65, 0.9), desired=9), Fleet(9, 9))) == ("stay", "maximum", 9)


def test_a_gap_in_the_samples() -> None:
    """Nothing is known of that time, so what was before it does not count."""
    old, new = samples((600, 0.1)), samples((300, 0.1))
    history = [*(replace(sample, at_s=sample.at_s - 340) for sample in old), *new]
    assert what(after(history)) == ("stay", "steady", 4)
    closer = [*(replace(sample, at_s=sample.at_s - 320) for sample in old), *new]
    assert what(after(closer)) == ("down", "idle", 3)
    assert what(decide(samples((605, 0.1)), FOUR, POLICY, 31.0)) == ("stay", "steady", 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_workers": 0},
        {"min_workers": 9},
        {"busy_low": 0.36},
        {"busy_aim": 0.75},
        {"busy_high": 1.1},
    ],
)
def test_policies_that_contradict_themselves(wrong: dict[str, float]) -> None:
    """They would oscillate, or never be content."""
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0]):
        replace(POLICY, **wrong)
