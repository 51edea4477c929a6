"""Lost expert workers that may come back in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.placement.state import WorkerView


@dataclass(frozen=True)
class _Absent:
    view: WorkerView
    until_s: float


class Absences:
    """Remembers workers that were lost, for as long as their share of the plan waits for them.

    A worker that was leaving when it went has left for good.

    Args:
        patience_s: How long.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._present: dict[str, WorkerView] = {}
        self._absent: dict[str, _Absent] = {}

    def observe(self, workers: Sequence[WorkerView], now_s: float) -> list[WorkerView]:
        """The workers that are there, then those that are absent.

        Args:
            workers: That are there now.
            now_s: On a monotonic clock.
        """
        present = {view.worker_id: view for view in workers}
        for worker_id, view in self._present.items():
            if worker_id not in present and not view.leaving:
                absent = replace(view, absent=True, retiring=frozenset())
                self._absent[worker_id] = _Absent(absent, now_s + self._patience_s)
        self._present = present
        self._absent = {
            worker_id: absent
            for worker_id, absent in self._absent.items()
            if worker_id not in present and now_s < absent.until_s
        }
        return [*workers, *(absent.view for absent in self._absent.values())]

    def next_end_s(self) -> float | None:
        """When the patience with some worker ends; None if all are there."""
        return min((absent.until_s for absent in self._absent.values()), default=None)
