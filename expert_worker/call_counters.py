"""Numbers of calls, as arrays that compiled code can add to."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh_kernels.cpu.words import get

ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class CallCounters:
    """Work of one source of calls; one thread adds to it at a time, any may read.

    Args:
        num_layers: Of the model, all kinds.
        num_experts: Most of a layer.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.work = np.zeros(4, np.int64)
        """Calls, rows, pairs, microseconds of computing."""
        self.rows_histogram = np.zeros(len(ROWS_BUCKETS) + 1, np.int64)
        """[buckets + 1] calls by number of rows: up to each of ROWS_BUCKETS, and above."""
        self.waits_histogram = np.zeros(len(WAIT_BOUNDS_S) + 1, np.int64)
        """[bounds + 1] calls that Python answered, by the time that they waited for the device."""
        self.queue_s = 0.0
        """Time that they waited, in seconds."""
        self.pairs_LE = np.zeros((num_layers, max(1, num_experts)), np.int64)
        """(row, expert) pairs computed."""
        self.in_flight = np.zeros(1, np.int64)
        """Calls that are being answered in compiled code."""

    @property
    def num_in_flight(self) -> int:
        """Calls that are being answered in compiled code, in order with its other words."""
        return get(self.in_flight.ctypes.data)

    @property
    def calls_by_wait(self) -> npt.NDArray[np.int64]:
        """[bounds + 1] all calls by the time that they waited for the device, as a copy.

        Compiled code takes the device when it is free, or leaves the call to Python.
        """
        waits = self.waits_histogram.copy()
        waits[0] += self.work[0] - waits.sum()
        return waits

    def count(
        self,
        layer: int,
        num_rows: int,
        expert_ids_N: npt.NDArray[np.int64],
        compute_us: int,
        queue_s: float,
    ) -> None:
        """Counts a call that Python answered."""
        self.work += (1, num_rows, len(expert_ids_N), compute_us)
        self.rows_histogram[bisect_left(ROWS_BUCKETS, num_rows)] += 1
        self.waits_histogram[bisect_left(WAIT_BOUNDS_S, queue_s)] += 1
        self.queue_s += queue_s
        self.pairs_LE[layer] += np.bincount(expert_ids_N, minlength=self.pairs_LE.shape[1])

    def add(self, other: CallCounters) -> None:
        """Takes in the work of another source, which ends."""
        self.work += other.work
        self.rows_histogram += other.rows_histogram
        self.waits_histogram += other.waits_histogram
        self.queue_s += other.queue_s
        self.pairs_LE += other.pairs_LE
