"""Pauses between tries: longer each time, and never the same for two gateways."""

from __future__ import annotations

import random

_MOST_ASKED_FOR_S = 120.0


class Backoff:
    """Owned by one task.

    Args:
        first_s: The longest first pause.
        most_s: The longest of all.
    """

    def __init__(self, first_s: float = 0.2, most_s: float = 10.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """A try succeeded."""
        self._next_s = self._first_s

    def next_s(self, asked_for_s: float = 0.0) -> float:
        """Seconds to wait now: a random part of a time that doubles.

        Args:
            asked_for_s: What the other side wants to be left alone for at least; not believed
                beyond two minutes.
        """
        limit_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        pause_s = random.uniform(0.5, 1.0) * limit_s
        return min(asked_for_s, _MOST_ASKED_FOR_S) + pause_s
