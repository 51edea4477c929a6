"""Adds up what attention workers report about their calls to expert workers, for metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.sequence import DispatchStats


class DispatchTotals:
    """Totals per expert worker since the gateway started. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, DispatchStats] = {}
        self._num_dropped_pairs = 0

    def add(self, response: pb.MembershipResponse) -> None:
        """Adds observations; each is what happened since the one before."""
        with self._lock:
            self._num_dropped_pairs += response.num_dropped_pairs
            for seen in response.observations:
                old = self._totals.get(seen.worker_id, DispatchStats(seen.worker_id))
                self._totals[seen.worker_id] = _sum(old, seen)

    def snapshot(self) -> tuple[DispatchStats, ...]:
        """Totals so far, by id of the expert worker."""
        with self._lock:
            return tuple(self._totals[name] for name in sorted(self._totals))

    def num_dropped_pairs(self) -> int:
        """(row, expert) pairs left out so far, as nobody had the expert."""
        return self._num_dropped_pairs


def _sum(old: DispatchStats, seen: pb.ExpertObservation) -> DispatchStats:
    return replace(
        old,
        calls=old.calls + seen.calls,
        faults=old.faults + seen.faults,
        hedges=old.hedges + seen.hedges,
        retries=old.retries + seen.retries,
        late_replies=old.late_replies + seen.late_replies,
        ejections=old.ejections + seen.ejections,
        damaged=old.damaged + seen.damaged,
        late_calls=old.late_calls + seen.late_calls,
        retry_causes=_added(old.retry_causes, seen.retries_by_cause),
        rows_out=old.rows_out + seen.rows_out,
        rows_back=old.rows_back + seen.rows_back,
        bytes_out=old.bytes_out + seen.bytes_out,
        bytes_back=old.bytes_back + seen.bytes_back,
        round_trip_s=old.round_trip_s + seen.round_trip_us / 1e6,
        compute_s=old.compute_s + seen.compute_us / 1e6,
        slowness=seen.slowness_percent / 100,
        last_fault=seen.last_fault or old.last_fault,
    )


def _added(old: Mapping[str, int], new: Mapping[str, int]) -> Mapping[str, int]:
    return {cause: old.get(cause, 0) + new.get(cause, 0) for cause in old.keys() | new.keys()}
