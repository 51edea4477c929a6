"""How many expert workers there should be: a pure function of what was measured of late.

Up when expert workers are busy or calls wait for them, down by one when they have been idle for
long. Nothing follows from a moment: what speaks for a change has to hold for a time, which begins
anew with each change, so that one change is seen to work before the next is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", "stay"]
Reason = Literal[
    "busy",  # up: devices compute most of the time
    "queue_wait",  # up: calls wait too long
    "copies",  # up: slots for all copies are missing; stay: they would be
    "minimum",  # up: below the least number
    "maximum",  # down: above the most; stay: there are as many as there may be
    "idle",  # down
    "booting",  # stay: those asked for are not here yet
    "uncovered",  # stay: experts have no copy
    "steady",  # stay: nothing speaks for a change
]


@dataclass(frozen=True)
class ScalingPolicy:
    """When the number of expert workers changes, and within which limits.

    Raises:
        ValueError: Values that contradict each other.
    """

    min_workers: int = 2
    """Fewest that are asked for."""
    max_workers: int = 8
    """Most that are asked for."""
    busy_high: float = 0.70
    """More are needed if devices compute for a larger share of the time, on the mean,"""
    busy_high_s: float = 60.0
    """for so long."""
    busy_aim: float = 0.55
    """So many are asked for that this share is left."""
    wait_high_s: float = 0.05
    """More are needed if 1 of 20 calls waits longer for the device,"""
    wait_high_for_s: float = 15.0
    """for so long."""
    busy_low: float = 0.30
    """One less will do if devices compute for a smaller share of the time,"""
    busy_low_s: float = 600.0
    """for so long."""
    longest_gap_s: float = 30.0
    """Between two samples; after a longer one, what was before says nothing."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers} and max_workers {self.max_workers}, expected "
                "1 <= min <= max"
            )
        if not 0 < 2 * self.busy_low < self.busy_high <= 1:
            raise ValueError(  # else one of two that is given up makes the other one too busy
                f"busy_low is {self.busy_low}, expected less than half of {self.busy_high}"
            )
        if not self.busy_low < self.busy_aim < self.busy_high:
            raise ValueError(f"busy_aim is {self.busy_aim}, expected between the two limits")


@dataclass(frozen=True)
class Sample:
    """What was measured since the sample before."""

    at_s: float
    """On a monotonic clock."""
    desired: int
    """Expert workers that were asked for."""
    present: int
    """Those of them that served."""
    busy: float
    """Share of the time for which their devices computed, on the mean."""
    wait_s: float
    """Time for the device that 19 of 20 calls did not wait longer than."""


@dataclass(frozen=True)
class Fleet:
    """The expert workers now."""

    desired: int
    """Asked for."""
    present: int
    """Those of them that serve."""
    num_for_copies: int = 0
    """As many as have slots for all copies."""
    can_shrink: bool = True
    """All copies fit on those that would be left if one went."""
    num_uncovered: int = 0
    """Experts without a copy."""

    @property
    def num_booting(self) -> int:
        """Asked for and not here yet."""
        return max(0, self.desired - self.present)


@dataclass(frozen=True)
class Decision:
    """How many expert workers there should be, and why."""

    direction: Direction
    reason: Reason
    num_workers: int
    why: str
    """For people."""


def decide(
    samples: Sequence[Sample], fleet: Fleet, policy: ScalingPolicy, now_s: float
) -> Decision:
    """Whether the number of expert workers is to change.

    Args:
        samples: Ascending in time; those of the last `busy_low_s` matter.
        fleet: The expert workers now.
        policy: Limits.
        now_s: On the clock of the samples.
    """
    least = min(max(policy.min_workers, fleet.num_for_copies), policy.max_workers)
    if fleet.desired < least:
        for_copies = fleet.num_for_copies > policy.min_workers
        why = f"{least} are the least" + " that hold all copies" * for_copies
        return Decision("up", "copies" if for_copies else "minimum", least, why)
    recent = _Recent(samples, now_s)
    if wish := _wish_for_more(recent, fleet, policy):
        return _within_most(wish, fleet, policy)
    if fleet.desired > policy.max_workers:
        why = f"{policy.max_workers} are the most"
        return _if_safe(Decision("down", "maximum", fleet.desired - 1, why), fleet)
    if fleet.desired > policy.min_workers and recent.is_idle(policy):
        why = f"busy for less than {policy.busy_low:.0%} of {policy.busy_low_s:.0f} s"
        return _if_safe(Decision("down", "idle", fleet.desired - 1, why), fleet)
    return Decision("stay", "steady", fleet.desired, "")


def _wish_for_more(recent: _Recent, fleet: Fleet, policy: ScalingPolicy) -> Decision | None:
    """What load asks for, beyond those that are on their way; None if it asks for nothing."""
    busy = recent.last(policy.busy_high_s, policy, lambda s: s.busy > policy.busy_high)
    waits = recent.last(
        policy.wait_high_for_s,
        policy,
        lambda s: s.wait_s > policy.wait_high_s and s.busy > policy.busy_low,
    )
    if busy:
        reason: Reason = "busy"
        share = sum(s.busy for s in busy) / len(busy)
        needed = math.ceil(sum(s.busy * s.present for s in busy) / len(busy) / policy.busy_aim)
        why = f"busy for {share:.0%} of {policy.busy_high_s:.0f} s"
    elif waits:
        reason, needed = "queue_wait", fleet.present + 1
        why = f"1 of 20 calls waited {min(s.wait_s for s in waits) * 1e3:.0f} ms or longer"
    else:
        return None
    if needed > fleet.desired:
        return Decision("up", reason, needed, why)
    if fleet.num_booting:
        return Decision("stay", "booting", fleet.desired, f"{why}; {fleet.num_booting} are coming")
    return None


def _within_most(wish: Decision, fleet: Fleet, policy: ScalingPolicy) -> Decision:
    most = max(policy.max_workers, fleet.desired)
    if wish.direction == "stay" or wish.num_workers <= most:
        return wish
    if most > fleet.desired:
        return Decision("up", wish.reason, most, f"{wish.why}; {most} are the most")
    return Decision("stay", "maximum", fleet.desired, f"{wish.why}; {most} are the most")


def _if_safe(wish: Decision, fleet: Fleet) -> Decision:
    """Fewer, unless experts lack a copy or would."""
    if fleet.num_uncovered:
        why = f"{fleet.num_uncovered} experts have no copy"
        return Decision("stay", "uncovered", fleet.desired, why)
    if not fleet.can_shrink:
        return Decision("stay", "copies", fleet.desired, "fewer could not hold all copies")
    return wish


def _is_same(before: Sample, after: Sample) -> bool:
    return (before.desired, before.present) == (after.desired, after.present)


def _is_no_arrival(before: Sample, after: Sample) -> bool:
    return before.desired == after.desired and before.present >= after.present


class _Recent:
    """Samples since the last change.

    Args:
        samples: Ascending in time.
        now_s: On their clock.
    """

    def __init__(self, samples: Sequence[Sample], now_s: float) -> None:
        self._samples = samples
        self._now_s = now_s

    def is_idle(self, policy: ScalingPolicy) -> bool:
        """True if devices hardly computed and calls did not wait, for long enough."""
        return bool(
            self.last(
                policy.busy_low_s,
                policy,
                lambda s: s.busy < policy.busy_low and s.wait_s <= policy.wait_high_s,
                is_calm=_is_same,
            )
        )

    def last(
        self,
        span_s: float,
        policy: ScalingPolicy,
        holds: Callable[[Sample], bool],
        is_calm: Callable[[Sample, Sample], bool] = _is_no_arrival,
    ) -> Sequence[Sample]:
        """Samples of the last `span_s`, if it held in all of them and nothing changed; else none.

        Args:
            span_s: Seconds until now.
            policy: For the longest gap.
            holds: What is to hold.
            is_calm: True if nothing changed between a sample and the next; by default, if none
                came and no other number was asked for.
        """
        begin_s = self._now_s - span_s
        found: list[Sample] = []
        for sample in reversed(self._samples):
            later = found[-1] if found else None
            gap_s = (later.at_s if later else self._now_s) - sample.at_s
            if gap_s > policy.longest_gap_s or (later and not is_calm(sample, later)):
                return ()
            if sample.at_s <= begin_s:
                return found
            if not holds(sample):
                return ()
            found.append(sample)
        return ()
