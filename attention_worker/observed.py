"""What is seen of one expert worker, until it is reported."""

from __future__ import annotations

import threading

from attention_worker.call_times import TYPICAL
from attention_worker.calls import Call, Cause
from attention_worker.link import Link
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import attention_service_pb2 as pb


class Observed:
    """Counts of one life of an expert worker; from any thread.

    Args:
        worker: Which one.
        link: Where compiled code counts.
    """

    def __init__(self, worker: ExpertWorkerEntry, link: Link) -> None:
        self._worker, self._link = worker, link
        self._lock = threading.Lock()
        self._seen = self._nothing()
        self.num_late_replies = 0
        """Replies that came too late or twice, and were dropped; ever."""
        self._num_answers = 0  # beside those that the link counts

    @property
    def num_answers(self) -> int:
        """Calls whose outputs were good."""
        return self._num_answers + self._link.num_answers

    def count_sent(self, num_rows: int, num_bytes: int) -> None:
        """Counts a call that was sent, with a payload of so many bytes."""
        with self._lock:
            self._seen.rows_out += num_rows
            self._seen.bytes_out += num_bytes

    def count_round_trip(self, took_s: float) -> None:
        """Counts the time of a call that was answered."""
        with self._lock:
            self._seen.round_trip_us += int(took_s * 1e6)

    def count_answer(self, num_pairs: int, num_bytes: int, compute_us: int) -> None:
        """Counts a call whose outputs, of so many bytes, were good."""
        with self._lock:
            self._num_answers += 1
            self._seen.calls += 1
            self._seen.rows_back += num_pairs
            self._seen.bytes_back += num_bytes
            self._seen.compute_us += compute_us

    def count_fault(self, reason: str) -> None:
        """Counts a call that was late or failed in whatever way."""
        with self._lock:
            self._seen.faults += 1
            self._seen.last_fault = reason

    def count_late(self, call: Call) -> None:
        """Counts a call that was not answered when it should have been; each one once."""
        if call.cause != "late":
            call.cause = "late"
            with self._lock:
                self._seen.late_calls += 1

    def count_retry(self, cause: Cause) -> None:
        """Counts that others were asked for the rows of a call that failed here."""
        with self._lock:
            self._seen.retries += 1
            self._seen.retries_by_cause[cause] += 1

    def count_hedge(self) -> None:
        """Counts that others were asked for the rows of a call that is late here."""
        with self._lock:
            self._seen.hedges += 1

    def count_late_reply(self) -> None:
        """Counts a reply that came too late or twice."""
        with self._lock:
            self.num_late_replies += 1
            self._seen.late_replies += 1

    def count_damaged(self) -> None:
        """Counts a call or a reply that was changed on the way."""
        with self._lock:
            self._seen.damaged += 1

    def count_ejections(self, count: int) -> None:
        """Counts that it is not asked for a while."""
        with self._lock:
            self._seen.ejections += count

    def take(self) -> pb.ExpertObservation | None:
        """What was seen since the last time; None without news."""
        with self._lock:
            seen, self._seen = self._seen, self._nothing()
            self._link.report(seen)
        if seen == self._nothing():
            return None
        seen.slowness_percent = self._link.slowness * 100 // TYPICAL
        return seen

    def _nothing(self) -> pb.ExpertObservation:
        worker = self._worker
        return pb.ExpertObservation(worker_id=worker.worker_id, incarnation=worker.incarnation)
