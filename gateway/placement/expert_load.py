"""How much each expert was used of late, from what expert workers count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.placement.state import ExpertKey, ExpertLoad, Experts, WorkerView

HALF_LIFE_S = 60.0
"""After so long a pair counts half."""

WorkerLife = tuple[str, int]
"""Worker id and incarnation."""


def life_of(view: WorkerView) -> WorkerLife:
    """Who it is."""
    return view.worker_id, view.incarnation


class RecentLoad:
    """Sums up pairs over all expert workers, old ones with less weight.

    Args:
        experts: What is counted.
        half_life_s: After so long a pair counts half.
    """

    def __init__(self, experts: Experts, half_life_s: float = HALF_LIFE_S) -> None:
        self._slot_of = {layer: slot for slot, layer in enumerate(experts.moe_layers)}
        self._half_life_s = half_life_s
        self._load_LE = experts.no_load()
        self._since_s: float | None = None
        self._seen: dict[WorkerLife, Mapping[ExpertKey, int]] = {}

    def take(
        self, counts: Iterable[tuple[WorkerLife, Mapping[ExpertKey, int]]], now_s: float
    ) -> None:
        """Adds what was computed since the last call.

        Args:
            counts: Of each expert worker that is there, pairs since its start by resident expert.
                An expert worker that comes back in the same life goes on where it was; what it was
                before it was first seen here counts as computed now.
            now_s: On a monotonic clock.
        """
        self._fade(now_s)
        present = dict(counts)
        for life, pairs in present.items():
            before = self._seen.get(life, {})
            if pairs is before:
                continue  # nothing was heard of it since
            for key, count in pairs.items():
                layer, expert = key
                self._load_LE[self._slot_of[layer], expert] += max(0, count - before.get(key, 0))
        self._seen = present

    def load_LE(self) -> ExpertLoad:
        """[MoE layers, experts] pairs of late, as a copy."""
        return self._load_LE.copy()

    def _fade(self, now_s: float) -> None:
        if self._since_s is not None:
            self._load_LE *= 0.5 ** (max(0.0, now_s - self._since_s) / self._half_life_s)
        self._since_s = now_s
