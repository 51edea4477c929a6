"""Calls that wait for the device of an expert worker: oldest step first, those of a layer together.

Threads: each call comes in a thread of its own, that of its stream or connection. There is no
thread for the device: whoever finds it free computes the oldest call and every other that waits for
the same experts, for all of them, until its own is done. Nothing waits for others to come, so a
call alone pays a lock, and calls that had to wait anyway cost one computation together. That
changes no bit, as kernels are batch-invariant.

Calls of direct connections are computed without the queue while nobody waits in it: see
`expert_worker.compiled_calls`. A turn keeps them and the queue apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expert_worker.device_turn import NoTurn, Turn
from expertmesh_kernels.grouped_mlp import ExpertTable

_LONGEST_WAIT_S = 120.0  # of a call without a deadline


def _always() -> bool:
    return True


@dataclass(eq=False)
class Job:
    """One call. Its own thread and the one that computes it change it, under the queue's lock."""

    layer: int
    experts: ExpertTable
    """Leased by the call until it is done."""
    x_RH: Tensor
    row_of_pair_N: npt.NDArray[np.int64]
    expert_of_pair_N: npt.NDArray[np.int64]
    age_s: float
    """When its step began, on the monotonic clock: the oldest comes first."""
    deadline_s: float | None
    """Latest time to start."""
    is_wanted: Callable[[], bool] = _always
    """False once whoever called is gone."""
    entered_s: float = 0.0
    started_s: float = 0.0
    compute_s: float = 0.0
    """Its share of the computation that it was part of, by pairs."""
    outputs_NH: Tensor | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """True once there are outputs or an error."""
        return self.outputs_NH is not None or self.error is not None


Compute = Callable[[Sequence[Job]], Sequence[Tensor]]
"""Outputs of several calls for the same experts."""


class DeviceQueue:
    """Hands calls to the device. Bounded by the threads that wait in it, one for each call.

    Args:
        compute: Called by one thread at a time.
        max_rows: Most rows of calls that are computed together.
        turn: Of the device, if others use it too.
    """

    def __init__(self, compute: Compute, max_rows: int, turn: Turn | None = None) -> None:
        self._compute = compute
        self._max_rows = max_rows
        self._turn = turn or NoTurn()
        self._condition = threading.Condition(threading.Lock())
        self._waiting: list[Job] = []
        self._is_busy = False

    def run(self, job: Job) -> None:
        """Returns when the job is done.

        Raises:
            TimeoutError: The device was not free before the deadline.
            ConnectionError: Whoever called was gone before it was computed.
            Exception: What computing it raised.
        """
        job.entered_s = time.monotonic()
        self._turn.want(1)
        try:
            with self._condition:
                self._waiting.append(job)
                while not job.is_done:
                    if self._is_busy:
                        self._wait(job)
                    else:
                        self._lead(job)
        finally:
            self._turn.want(-1)
        if job.error is not None:
            raise job.error

    def _wait(self, job: Job) -> None:
        """Until the device is free, the job is done or its time is up. The lock is held."""
        left_s = _left_s(job)
        is_ours = job not in self._waiting  # taken: it will be done, whatever the time
        if not self._condition.wait(None if is_ours else max(0.0, left_s)) and not is_ours:
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            waited_s = time.monotonic() - job.entered_s
            job.error = TimeoutError(f"the device was not free within {waited_s:.3f} s")

    def _lead(self, job: Job) -> None:
        """Computes what is due first. The lock is held, but not while waiting or computing."""
        self._is_busy = True
        try:
            if self._take_turn(job):
                try:
                    self._run_batch(self._take())
                finally:
                    self._turn.give_back()
            else:
                self._give_up(job)
        finally:
            self._is_busy = False
            self._condition.notify_all()

    def _take_turn(self, job: Job) -> bool:
        """Waits until nothing else computes; False if the time of the job is up before."""
        self._condition.release()
        try:
            return self._turn.take(_left_s(job))
        finally:
            self._condition.acquire()

    def _run_batch(self, batch: list[Job]) -> None:
        """Computes without the lock; whatever happens, nobody waits for ever."""
        if not batch:
            return
        self._condition.release()
        try:
            self._run(batch)
        finally:
            self._condition.acquire()
            for job in batch:
                job.error = job.error if job.is_done else RuntimeError("it was not computed")

    def _take(self) -> list[Job]:
        """The oldest job that still has time, and those that it can be computed with."""
        now_s = time.monotonic()
        for job in list(self._waiting):
            if job.deadline_s is not None and job.deadline_s <= now_s:
                self._give_up(job)
            elif not job.is_wanted():
                self._waiting.remove(job)
                job.error = ConnectionError("whoever called is gone")
        if not self._waiting:
            return []
        oldest = min(self._waiting, key=lambda job: job.age_s)  # the first of equals
        batch, num_rows = [oldest], oldest.x_RH.shape[0]
        for job in self._waiting:
            num_rows += job.x_RH.shape[0]
            if job is oldest or job.experts is not oldest.experts or num_rows > self._max_rows:
                num_rows -= job.x_RH.shape[0]
            else:
                batch.append(job)
        self._waiting = [job for job in self._waiting if job not in batch]
        return batch

    def _run(self, batch: list[Job]) -> None:
        """Computes jobs together; if that fails, one by one, so that a bad one harms itself."""
        started_s = time.monotonic()
        try:
            outputs = self._compute(batch)
        except Exception as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for job in batch:
                self._run([job])
            return
        compute_s = time.monotonic() - started_s
        num_pairs = sum(len(job.row_of_pair_N) for job in batch)
        for job, outputs_NH in zip(batch, outputs, strict=True):
            job.started_s = started_s
            job.compute_s = compute_s * len(job.row_of_pair_N) / max(1, num_pairs)
            job.outputs_NH = outputs_NH


def _left_s(job: Job) -> float:
    """Longest time that a job may still wait."""
    return _LONGEST_WAIT_S if job.deadline_s is None else job.deadline_s - time.monotonic()


class StepAges:
    """When the steps began that calls belong to. Safe to call from several threads.

    Steps are numbered by each gateway for itself, so their numbers do not tell which is older.
    """

    _MOST_GATEWAYS = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[int, tuple[int, float]] = {}

    def age_s(self, gateway: int, step: int, now_s: float) -> float:
        """When the first call of the step came; that of an earlier step counts as old as that.

        Args:
            gateway: Incarnation of the gateway.
            step: Number of its step.
            now_s: On the monotonic clock.
        """
        with self._lock:
            known, began_s = self._latest.get(gateway, (-1, now_s))
            if step <= known:
                return began_s
            self._latest.pop(gateway, None)  # so that those seen last are last
            self._latest[gateway] = step, now_s
            if len(self._latest) > self._MOST_GATEWAYS:
                del self._latest[next(iter(self._latest))]
            return now_s
