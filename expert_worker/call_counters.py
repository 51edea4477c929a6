"""Numbers of calls, as arrays that compiled code can add to."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

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
        self.pairs_LE = np.zeros((num_layers, max(1, num_experts)), np.int64)
        """(row, expert) pairs computed."""
        self.in_flight = np.zeros(1, np.int64)
        """Calls that are being answered in compiled code."""

    @property
    def num_in_flight(self) -> int:
        """Calls that are being answered in compiled code, in order with its other words."""
        return get(self.in_flight.ctypes.data)

    def count(
        self, layer: int, num_rows: int, expert_ids_N: npt.NDArray[np.int64], compute_us: int
    ) -> None:
        """Counts a call."""
        self.work += (1, num_rows, len(expert_ids_N), compute_us)
        self.rows_histogram[bisect_left(ROWS_BUCKETS, num_rows)] += 1
        self.pairs_LE[layer] += np.bincount(expert_ids_N, minlength=self.pairs_LE.shape[1])

    def add(self, other: CallCounters) -> None:
        """Takes in the work of another source, which ends."""
        self.work += other.work
        self.rows_histogram += other.rows_histogram
        self.pairs_LE += other.pairs_LE
