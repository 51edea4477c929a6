"""Two micro-batches of a step in turn: one computes attention while the rows of the other travel.

A forward pass is a generator with one `yield` per layer, where its rows are on their way. Whether
two of them in turn are quicker than one is decided for each step, by times measured in earlier
ones. For n rows let `own(n)` be what the attention worker computes, messages included, `away(n)`
what it then waits for, and `busy(n)` what the slowest expert worker computes of that:

    one micro-batch      own(n) + away(n)
    two micro-batches    max(2 own(n/2), own(n/2) + away(n/2), 2 busy(n/2))

Each is taken as a straight line in n. Owner: the thread that runs the steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attention_worker.batch import Batch

MIN_ROWS = 16
"""Smaller steps are never split: weights are read twice, and there is little to hide."""
ENTER_GAIN = 0.10
"""Share of a step's time that splitting must save, as predicted, to begin."""
LEAVE_GAIN = 0.03
"""Below it splitting ends."""
FIRST_WHOLE_STEPS = 8
"""Before any is split."""
COMPARED_STEPS = 4
"""Steps of a size, split and not, that are compared."""
SPLIT_STEPS = 128
"""After so many split steps a few are not split, to see again what that costs."""
FIRST_PAUSE_STEPS = 64
"""Without splitting, after it saved less than predicted; doubles each time."""
LONGEST_PAUSE_STEPS = 65_536

Passes = Sequence[Generator[None, None, Tensor]]


def run_in_turn(passes: Passes) -> list[Tensor]:
    """Drives forward passes, each to its next `yield`, until all have ended; their results.

    Raises:
        Exception: What a pass raised; the others are closed.
    """
    results: dict[int, Tensor] = {}
    try:
        while len(results) < len(passes):
            for index, forward in enumerate(passes):
                if index not in results:
                    try:
                        next(forward)
                    except StopIteration as end:
                        results[index] = end.value
    finally:
        for forward in passes:
            forward.close()
    return [results[index] for index in range(len(passes))]


def halves(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of two micro-batches, ascending, so that generated tokens come first in each.

    The first gets the first half by sequence and position. So a row's earlier positions are in the
    same half or in the first, whose keys and values of a layer are written before the second half
    comes to that layer.
    """
    middle = (len(batch.scheduled_rows_T) + 1) // 2
    rows_T = batch.scheduled_rows_T
    return np.sort(rows_T[:middle]), np.sort(rows_T[middle:])


@dataclass(frozen=True)
class StepTime:
    """What one step measured."""

    num_rows: int
    own_s: float
    """Time of the forward pass without waiting for experts."""
    wait_s: float
    """Time of waiting for experts."""
    busy_s: float
    """Time that the slowest expert worker of each layer computed."""
    is_split: bool


class _Line:
    """y = a + b n, fitted to what is seen; older values count less.

    As long as all n are alike, half of y counts as fixed. Where noise makes a or b negative, y is
    a multiple of n or constant.
    """

    _FORGETTING = 0.97
    _MOST_VARIANCE = 1e6
    _UNIT = 32.0  # rows; brings both coefficients to about the same size

    def __init__(self) -> None:
        self._ab = np.zeros(2)
        self._covariance = np.eye(2) * 1e3
        self._mean_n, self._mean_y = 0.0, 0.0
        self._num_seen = 0

    def see(self, n: float, y: float) -> None:
        """One value, by recursive least squares."""
        x = np.array((1.0, n / self._UNIT))
        spread = self._covariance @ x
        gain = spread / (self._FORGETTING + x @ spread)
        self._ab = self._ab + gain * (y - x @ self._ab)
        covariance = (self._covariance - np.outer(gain, spread)) / self._FORGETTING
        if np.trace(covariance) < self._MOST_VARIANCE:
            self._covariance = covariance
        self._num_seen += 1
        weight = max(1 / self._num_seen, 1 - self._FORGETTING)
        self._mean_n += weight * (n - self._mean_n)
        self._mean_y += weight * (y - self._mean_y)

    def __call__(self, n: float) -> float:
        """The value at n."""
        a, b = self._ab
        if a < 0:
            return self._mean_y * n / self._mean_n
        return float(a + b * n / self._UNIT) if b >= 0 else self._mean_y


class Splitter(Protocol):
    """Decides how many micro-batches a step has."""

    def should_split(self, num_rows: int) -> bool:
        """True if a step with so many rows is to be computed in two micro-batches."""
        ...

    def see(self, time: StepTime) -> None:
        """Learns from a step."""
        ...


class NeverSplit:
    """For expert workers on the cores of the attention worker: there is nothing to hide behind."""

    def should_split(self, num_rows: int) -> bool:
        """False."""
        return False

    def see(self, time: StepTime) -> None:
        """Learns nothing."""


class SplitByTimes:
    """Splits steps while measured times say that it pays.

    Lines predict whether to begin. From then on the times of split and whole steps of the same size
    are compared: a few whole ones in between show what the others save.
    """

    def __init__(self) -> None:
        self._own, self._away, self._busy = _Line(), _Line(), _Line()
        self._whole, self._split = _Latest(), _Latest()
        self._is_splitting = False
        self._num_split = 0
        self._whole_steps_due = FIRST_WHOLE_STEPS
        self._next_pause = FIRST_PAUSE_STEPS

    def should_split(self, num_rows: int) -> bool:
        """True if a step with so many rows is to be computed in two micro-batches."""
        if num_rows < MIN_ROWS:
            return False
        if self._whole_steps_due:
            self._whole_steps_due -= 1
            return False
        if self._whole.count(num_rows) < COMPARED_STEPS:
            return False
        gain = self.predicted_gain(num_rows)
        self._is_splitting = gain > (LEAVE_GAIN if self._is_splitting else ENTER_GAIN)
        return self._is_splitting

    def predicted_gain(self, num_rows: int) -> float:
        """Share of the time of a layer that two micro-batches save; negative if they cost."""
        whole_s = self._own(num_rows) + self._away(num_rows)
        own_s, away_s, busy_s = (line(num_rows / 2) for line in (self._own, self._away, self._busy))
        split_s = max(2 * own_s, own_s + away_s, 2 * busy_s)
        return 1 - split_s / whole_s if whole_s > 0 else 0.0

    def see(self, time: StepTime) -> None:
        """Learns from a step."""
        if time.is_split:
            self._see_split(time)
            return
        self._own.see(time.num_rows, time.own_s)
        self._away.see(time.num_rows, time.wait_s)
        self._busy.see(time.num_rows, time.busy_s)
        self._whole.see(time)

    def _see_split(self, time: StepTime) -> None:
        """Each half took half of the time; its rows were away for longer if there was a wait."""
        half_rows, own_s = time.num_rows / 2, time.own_s / 2
        self._own.see(half_rows, own_s)
        self._busy.see(half_rows, time.busy_s / 2)
        if time.wait_s > 0.1 * time.own_s:
            self._away.see(half_rows, time.wait_s / 2 + own_s)
        self._split.see(time)
        self._num_split += 1
        if self._split.count(time.num_rows) >= COMPARED_STEPS:
            saved = 1 - self._split(time.num_rows) / self._whole(time.num_rows)
            if saved < LEAVE_GAIN:
                self._pause()
        if self._num_split >= SPLIT_STEPS:
            self._num_split = 0
            self._whole_steps_due = COMPARED_STEPS

    def _pause(self) -> None:
        """It did not save what it should: not again for some time, and each time for longer."""
        self._is_splitting = False
        self._num_split = 0
        self._split.clear()
        self._whole_steps_due = self._next_pause
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE_STEPS)


class _Latest:
    """Latest steps by size; those whose rows differ by less than a quarter are of one size."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def see(self, time: StepTime) -> None:
        """One more."""
        kept = self._seen.setdefault(_size(time.num_rows), deque(maxlen=COMPARED_STEPS))
        kept.append(time.own_s + time.wait_s)

    def count(self, num_rows: int) -> int:
        """How many are kept."""
        return len(self._seen.get(_size(num_rows), ()))

    def __call__(self, num_rows: int) -> float:
        """Their median in seconds, where there are any: one that was disturbed does not matter."""
        return statistics.median(self._seen[_size(num_rows)])

    def clear(self) -> None:
        """Forgets all."""
        self._seen.clear()


def _size(num_rows: int) -> int:
    return round(3 * math.log2(num_rows))
