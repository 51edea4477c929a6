"""Which expert worker is slower than the others, and whether computing or the network is why.

A call's time grows with its rows, so an expert worker that is busier than others is no straggler:
times are compared after what more rows account for has been taken out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gateway.sequence import DispatchStats
from gateway.telemetry.telemetry import Window

WINDOW_S = 5.0
"""Over which they are looked for."""
_MIN_CALLS = 3
_FACTOR = 2.0
"""As many times as long as others take,"""
_EXCESS_S = 0.0005
"""and so much longer."""
_LATE_CALLS, _LATE_SHARE = 3, 0.05
"""So many calls, and such a share of them, were late."""


@dataclass(frozen=True)
class CallTimes:
    """Calls to one expert worker in a window."""

    worker_id: str
    counts: DispatchStats
    """What happened in the window."""
    seconds: float
    """Its length."""

    @property
    def round_trip_s(self) -> float:
        """Mean of a call that was answered."""
        return self.counts.round_trip_s / max(1, self.counts.calls)

    @property
    def compute_s(self) -> float:
        """Mean part of it that the expert worker computed."""
        return min(self.counts.compute_s / max(1, self.counts.calls), self.round_trip_s)

    @property
    def network_s(self) -> float:
        """Mean rest: the way there and back, and what it waited for."""
        return self.round_trip_s - self.compute_s

    @property
    def pairs_per_call(self) -> float:
        """(row, expert) pairs of a call."""
        return self.counts.rows_back / max(1, self.counts.calls)


@dataclass(frozen=True)
class Straggler:
    """An expert worker that is slower than others."""

    worker_id: str
    part: str
    """`compute`, `network` or `late`: where the time goes."""
    factor: float
    """Time of its calls to that of others, with as many rows."""
    why: str
    """For people."""


def call_times(window: Window) -> list[CallTimes]:
    """The calls of a window, by expert worker."""
    return [
        CallTimes(worker_id, _difference(now, window.begin.dispatch.get(worker_id)), window.seconds)
        for worker_id, now in sorted(window.end.dispatch.items())
    ]


def find_straggler(calls: Sequence[CallTimes]) -> Straggler | None:
    """The slowest expert worker, if it is a straggler.

    Args:
        calls: Of each expert worker in the window.
    """
    found = [
        straggler
        for one in calls
        if (straggler := _compare(one, [other for other in calls if other is not one]))
    ]
    return max(found, key=lambda straggler: straggler.factor, default=None)


def _compare(one: CallTimes, everyone_else: Sequence[CallTimes]) -> Straggler | None:
    others = [other for other in everyone_else if other.counts.calls >= _MIN_CALLS]
    if others and one.counts.calls >= _MIN_CALLS:
        usual_s = median(other.round_trip_s for other in others)
        usual_pairs = median(other.pairs_per_call for other in others)
        more_rows = max(1.0, one.pairs_per_call / max(1e-9, usual_pairs))
        factor = one.round_trip_s / max(1e-9, usual_s * more_rows)
        excess_s = one.round_trip_s - usual_s * more_rows
        if factor >= _FACTOR and excess_s >= _EXCESS_S:
            usual_compute_s = median(other.compute_s for other in others) * more_rows
            is_compute = one.compute_s - usual_compute_s >= excess_s / 2
            return _slow(one, usual_s, factor, "compute" if is_compute else "network")
    late = one.counts.late_calls
    if late >= _LATE_CALLS and late >= _LATE_SHARE * (one.counts.calls + late):
        why = f"{late} of its calls were late in {one.seconds:.0f} s"
        return Straggler(one.worker_id, "late", 1.0, why)
    return None


def _slow(one: CallTimes, usual_s: float, factor: float, part: str) -> Straggler:
    where = "computing" if part == "compute" else "on the way or waiting"
    why = (
        f"its calls take {one.round_trip_s * 1e3:.1f} ms, those of others "
        f"{usual_s * 1e3:.1f} ms; most of the difference is spent {where}"
    )
    return Straggler(one.worker_id, part, factor, why)


def _difference(now: DispatchStats, before: DispatchStats | None) -> DispatchStats:
    """What was counted after `before`."""
    if before is None:
        return now
    numbers = {
        field.name: getattr(now, field.name) - getattr(before, field.name)
        for field in dataclasses.fields(now)
        if field.type in ("int", "float")
    }
    return dataclasses.replace(now, **numbers)
