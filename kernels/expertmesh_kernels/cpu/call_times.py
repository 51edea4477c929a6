"""How long calls to expert workers take, by their size: what is late, and who is slow.

The size of a call is its (row, expert) pairs and its distinct experts; what it takes is known by
class of sizes, each twice as large as the one before, over all expert workers: a mean, and a peak,
above which about one call of a hundred is. One outlier at most doubles a peak, and it falls slowly.
Of each expert worker it is known how slow it is compared with the mean. What a call takes before it
computes anything is where the line through the means of the smallest and the largest class begins.

All is in words that threads write without a lock: they are estimates, and each is one word.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit

NUM_CLASSES = 32
NUM_SEEN, MEAN_NS, PEAK_NS = 0, 1, 2
NUM_TIME_WORDS = 3
"""Of each class."""

TYPICAL = 256
"""Slowness of an expert worker that takes as long as the mean."""
EXPERT_PAIRS = 16
"""An expert takes as long as so many pairs: its weights are read once for all of its rows."""
LATE_FACTOR = 3
"""A call is late after so many times the peak of its class,"""
EARLIEST_NS = 25_000_000
"""and never before."""

_MEMORY = 256
_ENOUGH_SEEN = 16
_MOST_CALL_EXPERTS = 64
_SLOWNESS_MEMORY = 32
_MOST_SLOWNESS = 64 * TYPICAL
_LEAST_SLOWNESS = TYPICAL // 16

Times = NDArray[np.int64]


@njit
def class_of(num_pairs: int, num_experts: int) -> int:
    """The class of a call's size, at least 1."""
    size, found = num_pairs + EXPERT_PAIRS * num_experts, 1
    while size > 1 and found < NUM_CLASSES - 1:
        size >>= 1
        found += 1
    return found


@njit
def late_after_ns(times: Times, size_class: int, slowness: int) -> int:
    """Time after which a call is late; 0 if nothing like it was seen.

    A size that was not seen yet counts as a multiple of a smaller one, or as a larger one.
    """
    for smaller in range(size_class, 0, -1):
        if times[smaller, NUM_SEEN] > 0:
            peak_ns = times[smaller, PEAK_NS] << (size_class - smaller)
            peak_ns = max(peak_ns, peak_ns * slowness // TYPICAL)
            return max(EARLIEST_NS, LATE_FACTOR * int(peak_ns))
    for larger in range(size_class + 1, NUM_CLASSES):
        if times[larger, NUM_SEEN] > 0:
            return max(EARLIEST_NS, LATE_FACTOR * int(times[larger, PEAK_NS]))
    return 0


@njit
def call_experts(times: Times) -> int:
    """What a call takes beside what its experts take, in experts; 0 if that is not known."""
    smallest, largest = 0, 0
    for found in range(1, NUM_CLASSES):
        if times[found, NUM_SEEN] >= _ENOUGH_SEEN:
            largest = found
            if smallest == 0:
                smallest = found
    if smallest == largest:
        return 0
    small, large = _middle_of(smallest), _middle_of(largest)
    more_ns = times[largest, MEAN_NS] - times[smallest, MEAN_NS]
    begin_ns = times[smallest, MEAN_NS] - more_ns * small // (large - small)
    expert_ns = max(more_ns * EXPERT_PAIRS // (large - small), 1)
    return int(min(max(begin_ns // expert_ns, 0), _MOST_CALL_EXPERTS))


@njit
def _middle_of(size_class: int) -> int:
    """A size in the class, in pairs; see `class_of`."""
    return (3 << size_class) >> 2


@njit
def see(times: Times, size_class: int, slowness: int, took_ns: int) -> int:
    """A call took so long; how slow its expert worker is now."""
    line = times[size_class]
    num_seen = line[NUM_SEEN] + 1
    line[NUM_SEEN] = num_seen
    if num_seen == 1:
        line[MEAN_NS], line[PEAK_NS] = took_ns, took_ns
        return slowness
    memory = min(num_seen, _MEMORY)
    mean_ns = max(1, line[MEAN_NS])
    line[MEAN_NS] += (min(took_ns, 8 * mean_ns) - mean_ns) // memory
    usual_ns, peak_ns = took_ns * TYPICAL // max(TYPICAL, slowness), line[PEAK_NS]
    if usual_ns > peak_ns:
        line[PEAK_NS] = min(usual_ns, 2 * peak_ns)
    else:
        line[PEAK_NS] += (usual_ns - peak_ns) // memory
    now = min(max(took_ns * TYPICAL // mean_ns, _LEAST_SLOWNESS), _MOST_SLOWNESS)
    return int(slowness + (now - slowness) // _SLOWNESS_MEMORY)
