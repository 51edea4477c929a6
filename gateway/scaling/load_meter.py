"""How busy expert workers were since the last look, from what they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertmesh.call_waits import wait_quantile_s
from gateway.mesh.worker_report import KnownWorker, WorkCounters

_WAIT_SHARE = 0.95
_Life = tuple[str, int]
"""Worker id and incarnation."""


@dataclass(frozen=True)
class MeasuredLoad:
    """Of the time between two looks."""

    busy: float
    """Share of the time for which devices computed, on the mean over expert workers, 0 to 1."""
    wait_s: float
    """Time for the device that 19 of 20 calls did not wait longer than."""


class LoadMeter:
    """Compares counters of expert workers with those of the last look."""

    def __init__(self) -> None:
        self._seen: dict[_Life, WorkCounters] = {}

    def look(self, workers: Sequence[KnownWorker]) -> MeasuredLoad | None:
        """The load since the last look; None if nothing was heard since of any that were there.

        Args:
            workers: Those that serve.
        """
        counters = {(w.view.worker_id, w.view.incarnation): w.work for w in workers}
        busy: list[float] = []
        waits = np.zeros(0, np.int64)
        for life, now in counters.items():
            before = self._seen.get(life)
            if before is None or now.uptime_s <= before.uptime_s:
                continue  # new, or silent since
            busy.append(min(1.0, (now.busy_s - before.busy_s) / (now.uptime_s - before.uptime_s)))
            waits = _sum(waits, np.subtract(now.calls_by_wait, before.calls_by_wait))
        self._seen = counters
        if not busy:
            return None
        return MeasuredLoad(sum(busy) / len(busy), wait_quantile_s(waits.tolist(), _WAIT_SHARE))

    def forget(self) -> None:
        """The next look is the first one."""
        self._seen = {}


def _sum(waits: np.ndarray, more: np.ndarray) -> np.ndarray:
    return waits + more if waits.size else more
