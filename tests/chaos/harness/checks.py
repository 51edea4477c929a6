"""What a load saw of a fault: failed requests, changed tokens, stalls; what the mesh still holds.

A *stall* is the longest gap between two tokens of a stream around a fault, less that stream's
median gap. One value is taken per fault, the largest of all streams that were open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import psutil

from tests.chaos.harness.streams import Streamed
from tests.support.api import Api
from tests.support.processes import poll

Answers = Mapping[int, Streamed]
_ENOUGH_TOKENS = 8
"""Of a stream, for a median gap that means something."""


def failed(streams: Iterable[Streamed]) -> list[str]:
    """What went wrong, of each stream that failed."""
    return [f"request {stream.number}: {stream.error}" for stream in streams if stream.error]


def changed(streams: Iterable[Streamed], expected: Answers) -> list[str]:
    """Of each stream whose tokens, log probabilities or finish reason are not what they must be.

    A stream that failed must have the beginning of its answer.
    """
    return [
        f"request {stream.number}: token {_first_difference(stream, expected[stream.number])}"
        for stream in streams
        if not _agrees(stream, expected[stream.number])
    ]


def _agrees(stream: Streamed, whole: Streamed) -> bool:
    if not stream.error:
        return stream.answer == whole.answer
    count = len(stream.tokens)
    return (stream.tokens, stream.logprobs) == (whole.tokens[:count], whole.logprobs[:count])


def _first_difference(stream: Streamed, whole: Streamed) -> str:
    pairs = zip(stream.tokens, stream.logprobs, whole.tokens, whole.logprobs, strict=False)
    for index, (token, logprob, right_token, right_logprob) in enumerate(pairs):
        if (token, logprob) != (right_token, right_logprob):
            return f"{index} is {token} ({logprob}), not {right_token} ({right_logprob})"
    return (
        f"{len(stream.tokens)} of {len(whole.tokens)}: {stream.finish_reason},"
        f" not {whole.finish_reason}"
    )


def stall_s(streams: Iterable[Streamed], fault_s: float, within_s: float) -> float | None:
    """The stall of a fault, in seconds; None if no stream was open that could tell.

    Args:
        streams: All streams of the load.
        fault_s: When it happened, on the monotonic clock.
        within_s: The longest gap may begin so much later.
    """
    stalls = [
        stall for stream in streams if (stall := _stall_s(stream, fault_s, within_s)) is not None
    ]
    return max(stalls, default=None)


def _stall_s(stream: Streamed, fault_s: float, within_s: float) -> float | None:
    times_s = stream.times_s
    if len(times_s) < _ENOUGH_TOKENS or not times_s[0] <= fault_s < times_s[-1]:
        return None
    gaps = [later - earlier for earlier, later in pairwise(times_s)]
    hit = [
        gap
        for gap, (earlier, later) in zip(gaps, pairwise(times_s), strict=True)
        if later > fault_s and earlier < fault_s + within_s
    ]
    return max(hit) - median(gaps)


def longest_gap_s(streams: Iterable[Streamed]) -> float:
    """The longest time that any stream was silent."""
    return max(
        (later - earlier for stream in streams for earlier, later in pairwise(stream.times_s)),
        default=0.0,
    )


def time_per_token_s(streams: Iterable[Streamed], start_s: float, end_s: float) -> list[float]:
    """Of each stream whose tokens all came within a span of time: seconds from one to the next."""
    return [
        (stream.times_s[-1] - stream.times_s[0]) / (len(stream.times_s) - 1)
        for stream in streams
        if len(stream.times_s) > 1 and start_s <= stream.times_s[0] and stream.times_s[-1] <= end_s
    ]


def tokens_between(streams: Iterable[Streamed], start_s: float, end_s: float) -> int:
    """Tokens that arrived in a span of time."""
    return sum(start_s <= time_s < end_s for stream in streams for time_s in stream.times_s)


def wait_idle(api: Api) -> None:
    """Fails unless requests, KV blocks and slots are gone a moment after the last answer."""
    names = ("num_requests_running", "num_requests_waiting", "request_slots_used", "kv_blocks_used")

    def idle() -> bool:
        metrics = api.metrics()
        return not any(metrics[f"moe_{name}"] for name in names)

    poll(idle, timeout_s=15.0, what="no request, KV block or slot is held")


class Footprint:
    """Descriptors, threads and memory of processes, and whether they have grown since."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = list(processes)
        self._before = [_measure(process) for process in self._processes]

    def growth(self) -> list[tuple[int, int, float]]:
        """Of each process: descriptors, threads, and MiB that it has more than at first."""
        now = [_measure(process) for process in self._processes]
        return [
            (fds - old_fds, threads - old_threads, (rss - old_rss) / 2**20)
            for (fds, threads, rss), (old_fds, old_threads, old_rss) in zip(
                now, self._before, strict=True
            )
        ]


def _measure(process: psutil.Process) -> tuple[int, int, int]:
    with process.oneshot():
        return process.num_fds(), process.num_threads(), process.memory_info().rss
