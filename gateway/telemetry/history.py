"""The recent past, as moments: a window is the difference between two of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gateway.mesh.gate_totals import RowCounts
from gateway.sequence import DispatchStats
from gateway.telemetry.latencies import RequestCounts

INTERVAL_S = 1.0
"""Between two moments."""
_FINE_S, _LONGEST_S, _COARSE_STEP = 70, 310, 5
"""Each second is kept for a little over a minute, each fifth for a little over five."""

WorkerLife = tuple[str, int]
"""Worker id and incarnation."""


@dataclass(frozen=True)
class Moment:
    """All that counts upwards, at one time."""

    at_s: float
    """On the monotonic clock."""
    gate_rows_LE: RowCounts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    dispatch: Mapping[str, DispatchStats] = field(default_factory=dict)
    """Calls by worker id."""
    pairs: Mapping[WorkerLife, Mapping[int, int]] = field(default_factory=dict)
    """(row, expert) pairs that expert workers computed, by layer."""
    requests: RequestCounts = field(default_factory=RequestCounts)
    num_steps: int = 0


class History:
    """Moments of the last five minutes, and the first one. May be used from any thread.

    Args:
        first: The moment that everything is counted from.
    """

    def __init__(self, first: Moment) -> None:
        self._lock = threading.Lock()
        self._first = first
        self._fine: deque[Moment] = deque(maxlen=int(_FINE_S / INTERVAL_S))
        self._coarse: deque[Moment] = deque(maxlen=int(_LONGEST_S / INTERVAL_S / _COARSE_STEP))
        self._num_seen = 0

    def add(self, moment: Moment) -> None:
        """Adds one, which is later than all that are there."""
        with self._lock:
            self._fine.append(moment)
            if self._num_seen % _COARSE_STEP == 0:
                self._coarse.append(moment)
            self._num_seen += 1

    def begin_of(self, window_s: float | None, now_s: float) -> Moment:
        """The latest moment that is at least so long ago; the first one if there is none.

        Args:
            window_s: Seconds; None for all the time there was.
            now_s: On the monotonic clock.
        """
        if window_s is None:
            return self._first
        with self._lock:
            for moments in (self._fine, self._coarse):
                for moment in reversed(moments):
                    if now_s - moment.at_s >= window_s - INTERVAL_S / 2:
                        return moment
        return self._first
