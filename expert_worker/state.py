"""What an expert worker says of itself, and the counters of its work.

Any thread may call anything here: one lock guards all of it. `changed` wakes those who wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expert_worker.call_counters import CallCounters
from expert_worker.store import ExpertStore
from expertmesh import PROTOCOL_REVISION
from expertmesh.errors import WireError
from expertmesh.process_usage import usage_of
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import DTYPE_CODES
from expertmesh_kernels.cpu.words import put

_LOOK_S = 0.01  # how often compiled code is asked whether its calls have ended, while one waits


@dataclass(frozen=True)
class WorkerIdentity:
    """What never changes during one life of an expert worker."""

    worker_id: str
    incarnation: int
    numerics_fingerprint: bytes
    row_credits: int
    """Token rows that one stream may have in flight."""
    node: str = ""
    """Machine that it runs on."""


class WorkerState:
    """State of one expert worker.

    Args:
        identity: Who it is.
        store: Its experts; changes of residency are announced from here on.
    """

    def __init__(self, identity: WorkerIdentity, store: ExpertStore) -> None:
        self.identity = identity
        self.store = store
        self._born_s = time.monotonic()
        self._stopped = threading.Event()
        self._condition = threading.Condition()
        self._version = 0
        self._num_snapshots = 0
        self._drain_ends_s: float | None = None  # on the monotonic clock
        self._num_watches = 0
        self._num_hand_overs = 0  # watches of gateways that hand experts over
        self.refusing = np.zeros(1, np.int64)
        """Not 0 once calls are refused; compiled code looks at it."""
        put(self.refusing.ctypes.data, 0)  # loads what a drain needs
        self._in_flight = 0  # but for those in compiled code
        self._load = pb.LoadCounters()
        self._counters = self.new_counters()  # of calls that Python answers, and of what has ended
        self._connections: list[CallCounters] = []
        store.on_change = self.changed

    # --- waiting ---

    def changed(self) -> None:
        """Wakes everyone who waits for a change."""
        with self._condition:
            self._version += 1
            self._condition.notify_all()

    def wake(self) -> None:
        """Makes those who wait look again whether they still have a reason to."""
        with self._condition:
            self._condition.notify_all()

    def wait_change(
        self, seen_version: int, timeout_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> int:
        """The version, as soon as it differs from `seen_version` or after the timeout.

        Args:
            seen_version: What the last call returned; -1 at first.
            timeout_s: Longest wait.
            wanted: Asked at each `wake`; the wait ends when it says no.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self.stopping or self._version != seen_version or not wanted(), timeout_s
            )
            return self._version

    @property
    def stopping(self) -> bool:
        """True once the process ends: whoever waits here must return."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Ends all waits here, for good."""
        self._stopped.set()
        self.changed()

    def wait_stop(self, timeout_s: float) -> bool:
        """True as soon as the process ends; False after the timeout."""
        return self._stopped.wait(timeout_s)

    # --- draining ---

    @property
    def draining(self) -> bool:
        """True from the start of a drain."""
        return self._drain_ends_s is not None

    @property
    def drain_left_s(self) -> float:
        """Seconds until the end of the drain, whatever is left then; infinite without one."""
        return math.inf if self._drain_ends_s is None else remaining(self._drain_ends_s)

    def begin_drain(self, grace_s: float) -> None:
        """Says that it drains; calls are still answered. A drain that has begun goes on as it is.

        Args:
            grace_s: Longest time until the end.
        """
        with self._condition:
            if self._drain_ends_s is None:
                self._drain_ends_s = time.monotonic() + grace_s
        self.changed()

    def check_not_draining(self) -> None:
        """Raises WireError DRAINING."""
        if self.draining:
            raise self._draining_error()

    def _draining_error(self) -> WireError:
        text = f"expert worker {self.identity.worker_id} is draining"
        return WireError(pb.ForwardError.CODE_DRAINING, text)

    def refuse_calls(self) -> None:
        """Answers new calls with DRAINING from now on."""
        put(self.refusing.ctypes.data, 1)
        self.changed()

    @property
    def calls_in_flight(self) -> int:
        """Calls that are being answered."""
        with self._condition:
            return self._count_in_flight()

    @property
    def num_streams(self) -> int:
        """Open Forward streams."""
        return self._load.streams

    def wait_idle(self, timeout_s: float) -> bool:
        """True once nothing is in flight; False after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while not (is_idle := self.stopping or not self._count_in_flight()):
                if not remaining(deadline_s):
                    break
                self._condition.wait(min(_LOOK_S, remaining(deadline_s)))
            return is_idle

    def _count_in_flight(self) -> int:
        """The lock is held."""
        return self._in_flight + sum(served.num_in_flight for served in self._connections)

    def wait_no_streams(self, timeout_s: float) -> bool:
        """True once no Forward stream is open; False after the timeout."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self.stopping or not self._load.streams, timeout_s
            )

    @property
    def is_handed_over(self) -> bool:
        """True if no expert is left here."""
        return not self.store.num_used_slots

    @property
    def num_hand_overs(self) -> int:
        """Open Watch streams of gateways that hand experts over."""
        return self._num_hand_overs

    # --- counting ---

    def open_watch(self, max_watches: int, *, hands_over: bool) -> bool:
        """Counts a Watch stream; False if there are too many."""
        with self._condition:
            if self._num_watches >= max_watches:
                return False
            self._num_watches += 1
            self._num_hand_overs += hands_over
            return True

    def close_watch(self, *, hands_over: bool) -> None:
        """Counts the end of a Watch stream."""
        with self._condition:
            self._num_watches -= 1
            self._num_hand_overs -= hands_over
            self._condition.notify_all()

    def open_stream(self, max_streams: int) -> bool:
        """Counts a Forward stream; False if there are too many."""
        with self._condition:
            if self._load.streams >= max_streams:
                return False
            self._load.streams += 1
            return True

    def close_stream(self) -> None:
        """Counts the end of a Forward stream."""
        with self._condition:
            self._load.streams -= 1
            self._condition.notify_all()

    def begin_call(self) -> None:
        """Counts a call that will be computed. Raises WireError DRAINING."""
        with self._condition:
            if self.refusing[0]:
                raise self._draining_error()
            self._in_flight += 1

    def end_call(self) -> None:
        """Counts the end of a call that began."""
        with self._condition:
            self._in_flight -= 1
            if not self._in_flight:
                self._condition.notify_all()

    def count_answer(
        self,
        layer: int,
        num_rows: int,
        expert_ids_N: npt.NDArray[np.int64],
        compute_us: int,
        queue_s: float,
    ) -> None:
        """Counts a call that was answered with outputs."""
        with self._condition:
            self._counters.count(layer, num_rows, expert_ids_N, compute_us, queue_s)

    def new_counters(self) -> CallCounters:
        """Counters that nobody looks at."""
        return CallCounters(self.store.config.num_layers, self.store.config.num_experts)

    @contextmanager
    def connection(self) -> Iterator[CallCounters]:
        """A context with counters that compiled code adds to, for one connection."""
        counters = self.new_counters()
        with self._condition:
            self._connections.append(counters)
        try:
            yield counters
        finally:
            with self._condition:
                self._connections = [kept for kept in self._connections if kept is not counters]
                self._counters.add(counters)
                self._condition.notify_all()

    def _total(self) -> CallCounters:
        """Counters of all calls, as a copy. The lock is held."""
        total = self.new_counters()
        for counters in (self._counters, *self._connections):
            total.add(counters)
        return total

    def count_error(self) -> None:
        """Counts a call that was answered with an error."""
        with self._condition:
            self._load.errors += 1

    def pairs_LE(self) -> npt.NDArray[np.int64]:
        """[layers, experts] (row, expert) pairs computed so far."""
        with self._condition:
            return self._total().pairs_LE

    def rows_histogram(self) -> npt.NDArray[np.int64]:
        """[buckets + 1] calls by number of rows: up to each of ROWS_BUCKETS, and above."""
        with self._condition:
            return self._total().rows_histogram

    def load(self) -> pb.LoadCounters:
        """The counters, as a copy."""
        load = pb.LoadCounters()
        with self._condition:
            load.CopyFrom(self._load)
            total = self._total()
            load.calls, load.rows, load.pairs, load.compute_us = total.work.tolist()
            load.queue_us = int(total.queue_s * 1e6)
            load.calls_by_wait.extend(total.calls_by_wait.tolist())
            load.uptime_us = int((time.monotonic() - self._born_s) * 1e6)
            load.queued_calls = max(0, self._count_in_flight() - 1)  # one of them has the device
        usage = usage_of()
        load.cpu_us, load.rss_bytes = int(usage.cpu_s * 1e6), usage.rss_bytes
        return load

    # --- telling ---

    def snapshot(self) -> pb.WatchResponse:
        """The state, whole."""
        with self._condition:
            self._num_snapshots += 1
            sequence = self._num_snapshots
        return pb.WatchResponse(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            protocol_revision=PROTOCOL_REVISION,
            model=self._model(),
            numerics_fingerprint=self.identity.numerics_fingerprint,
            device=str(self.store.device),
            capacity=self._capacity(),
            layers=self._layers(),
            draining=self.draining,
            load=self.load(),
            row_credits=self.identity.row_credits,
            sequence=sequence,
            node=self.identity.node,
            drain=self.drain_progress(),
        )

    def drain_progress(self) -> pb.DrainProgress | None:
        """How far the drain is; None while there is none."""
        if not self.draining:
            return None
        return pb.DrainProgress(
            experts_left=self.store.num_used_slots,
            calls_in_flight=self.calls_in_flight,
            time_left_ms=min(int(self.drain_left_s * 1000), 2**32 - 1),
        )

    def _layers(self) -> list[pb.LayerExperts]:
        pairs_LE = self.pairs_LE()
        return [
            pb.LayerExperts(
                layer=layer,
                resident=held.resident,
                retiring=held.retiring,
                pairs=pairs_LE[layer, list(held.resident)].tolist(),
                fingerprints=held.fingerprints,
            )
            for layer, held in self.store.residency().items()
        ]

    def _model(self) -> pb.ModelIdentity:
        checkpoint, config = self.store.checkpoint, self.store.config
        return pb.ModelIdentity(
            fingerprint=checkpoint.fingerprint,
            name=checkpoint.name,
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            dtype=DTYPE_CODES[self.store.dtype],
            expert_dtype=self.store.plan.name,
        )

    def _capacity(self) -> pb.Capacity:
        return pb.Capacity(
            expert_slots=self.store.num_slots,
            used_expert_slots=self.store.num_used_slots,
            bytes_per_expert=self.store.bytes_per_expert,
            resident_bytes=self.store.resident_bytes,
        )


def elapsed_us(seconds: float) -> int:
    """Seconds as whole microseconds that fit a uint32."""
    return min(max(0, int(seconds * 1e6)), 2**32 - 1)


def time_left_deadline(received_s: float, time_left_us: int) -> float | None:
    """Deadline on the monotonic clock of a call; None without a limit."""
    return received_s + time_left_us / 1e6 if time_left_us else None


def remaining(deadline_s: float) -> float:
    """Seconds until a deadline on the monotonic clock, at least 0."""
    return max(0.0, deadline_s - time.monotonic())
