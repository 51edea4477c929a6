"""Times as counts in narrow buckets, so that quantiles of any span of time can be told."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_SHORTEST_S = 1e-4
_PER_DECADE = 20
"""Buckets; each is 12 % wide, so quantiles are right within that."""
_NUM_BUCKETS = 7 * _PER_DECADE

Counts = npt.NDArray[np.int64]
"""[buckets] number n counts times up to `_SHORTEST_S` * 10 ** (n / _PER_DECADE)."""


def quantile_s(counts: Counts, share: float) -> float | None:
    """The time that so many of the times are not above, in seconds; None if there are none.

    Args:
        counts: Times.
        share: 0 to 1.
    """
    below = np.cumsum(counts)
    if not len(below) or not below[-1]:
        return None
    rank = share * below[-1]
    bucket = int(np.searchsorted(below, rank))
    before = below[bucket - 1] if bucket else 0
    part = (rank - before) / max(1, counts[bucket])
    return float(_SHORTEST_S * 10 ** ((bucket - 1 + part) / _PER_DECADE))


def _bucket(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(math.ceil(math.log10(seconds / _SHORTEST_S) * _PER_DECADE), _NUM_BUCKETS - 1)


def _none() -> Counts:
    return np.zeros(_NUM_BUCKETS, np.int64)


@dataclass(frozen=True)
class RequestCounts:
    """What requests came to since the gateway started, or between two moments."""

    finished: int = 0
    failed: int = 0
    """Part of them that ended with an error."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft: Counts = field(default_factory=_none)
    """From arrival to the first token."""
    itl: Counts = field(default_factory=_none)
    """Between tokens of a request."""
    e2e: Counts = field(default_factory=_none)
    """From arrival to the last token."""
    queue: Counts = field(default_factory=_none)
    """From arrival to the first request slot."""

    def since(self, before: RequestCounts) -> RequestCounts:
        """What came after `before`."""
        return RequestCounts(
            **{name: now - getattr(before, name) for name, now in vars(self).items()}
        )


class RequestTotals:
    """Counts what the engines tell; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, Any] = dict.fromkeys(
            ("finished", "failed", "prompt_tokens", "generation_tokens"), 0
        )
        self._times = {name: [0] * _NUM_BUCKETS for name in ("ttft", "itl", "e2e", "queue")}

    def started(self, num_prompt_tokens: int, queue_s: float) -> None:
        """A request got its first request slot."""
        with self._lock:
            self._numbers["prompt_tokens"] += num_prompt_tokens
            self._times["queue"][_bucket(queue_s)] += 1

    def first_token(self, since_arrival_s: float) -> None:
        """The first token of a request was sampled."""
        with self._lock:
            self._numbers["generation_tokens"] += 1
            self._times["ttft"][_bucket(since_arrival_s)] += 1

    def next_token(self, since_last_s: float) -> None:
        """A further token was sampled."""
        with self._lock:
            self._numbers["generation_tokens"] += 1
            self._times["itl"][_bucket(since_last_s)] += 1

    def finished(self, since_arrival_s: float, *, failed: bool) -> None:
        """A request ended."""
        with self._lock:
            self._numbers["finished"] += 1
            self._numbers["failed"] += failed
            self._times["e2e"][_bucket(since_arrival_s)] += 1

    def snapshot(self) -> RequestCounts:
        """So far."""
        with self._lock:
            times: dict[str, Any] = {name: np.array(it) for name, it in self._times.items()}
            return RequestCounts(**self._numbers, **times)
