"""What is known of how long calls take, for Python and compiled code alike.

See `expertmesh_kernels.cpu.call_times`.
"""

from __future__ import annotations

import numpy as np

from expertmesh_kernels.cpu import call_times as cpu

TYPICAL = cpu.TYPICAL

HEDGED_SHARE = 0.1
"""Of all calls: so many may be asked elsewhere too since they are late,"""
HEDGES_AT_ONCE = 16
"""and so many at a time."""


class CallTimes:
    """Times of calls to all expert workers."""

    def __init__(self) -> None:
        self._words = np.zeros((cpu.NUM_CLASSES, cpu.NUM_TIME_WORDS), np.int64)

    @property
    def address(self) -> int:
        """Of the words, which live as long as this object."""
        return self._words.ctypes.data

    def late_after_s(self, size_class: int, slowness: int) -> float | None:
        """Seconds after which a call is late; None if nothing like it was seen.

        Args:
            size_class: Of the call, see `size_class`.
            slowness: Of the expert worker.
        """
        return cpu.late_after_ns(self._words, size_class, slowness) / 1e9 or None

    @property
    def call_experts(self) -> int:
        """What a call takes beside what its experts take, in experts; 0 if that is not known."""
        return cpu.call_experts(self._words)

    def see(self, size_class: int, slowness: int, took_s: float) -> int:
        """A call took so long; returns how slow its expert worker is now."""
        return cpu.see(self._words, size_class, slowness, int(took_s * 1e9))


def size_class(num_pairs: int, num_experts: int) -> int:
    """The class of a call with so many (row, expert) pairs and distinct experts."""
    return cpu.class_of(num_pairs, num_experts)


class HedgeBudget:
    """How many late calls may be asked elsewhere too: if all is late, more calls do not help."""

    def __init__(self) -> None:
        self._left = float(HEDGES_AT_ONCE)
        self._num_calls = 0

    def take(self, num_calls: int) -> bool:
        """True if one more may be.

        Args:
            num_calls: Calls so far; a smaller number than before begins anew.
        """
        more = max(0, num_calls - self._num_calls)
        self._num_calls = num_calls
        self._left = min(self._left + more * HEDGED_SHARE, HEDGES_AT_ONCE)
        if self._left < 1:
            return False
        self._left -= 1
        return True
