"""Whose turn the device is, between the queue, compiled calls and who moves weights.

Compiled calls take it when nobody else wants it, and never wait for it. All words are read by
compiled code; see `expertmesh_kernels.cpu.serve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from expertmesh_kernels.cpu.words import add, give_back, take

_WORDS_APART = 8  # a cache line
_PATIENCE_S = 0.1  # for a gap between two compiled calls


class Turn(Protocol):
    """The right to use the device."""

    def want(self, change: int) -> None:
        """Adds to the number of those who wait for it or are about to."""

    def take(self, timeout_s: float) -> bool:
        """Waits for it; False when time is over."""

    def give_back(self) -> None:
        """Lets others have it."""


class NoTurn:
    """For a device that its queue alone uses."""

    def want(self, change: int) -> None:
        """Nobody asks."""

    def take(self, timeout_s: float) -> bool:
        """It is free."""
        return True

    def give_back(self) -> None:
        """It stays free."""


class DeviceTurn:
    """Two words that compiled code looks at, too. Safe to call from several threads."""

    def __init__(self) -> None:
        self._words = np.zeros(2 * _WORDS_APART, np.int64)
        self.device: int = self._words.ctypes.data
        """Address of the lock."""
        self.wanted: int = self.device + _WORDS_APART * self._words.itemsize
        """Address of the number of those who wait."""

    def want(self, change: int) -> None:
        """Adds to the number of those who wait for it or are about to."""
        add(self.wanted, change)

    def take(self, timeout_s: float) -> bool:
        """Waits for it, holding no GIL; False when time is over."""
        return take(self.device, max(0, int(timeout_s * 1e9)))

    def give_back(self) -> None:
        """Lets others have it."""
        give_back(self.device)

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """A context that has it, unless the value is False: time was over.

        For work that can wait: it takes the device between two compiled calls, and sends these out
        of its way only if they leave no gap.
        """
        is_held = self.take(min(_PATIENCE_S, timeout_s))
        if not is_held:
            self.want(1)
            is_held = self.take(timeout_s)
            self.want(-1)
        try:
            yield is_held
        finally:
            if is_held:
                self.give_back()
