"""Where the time of a step goes, measured with a clock reading here and there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attention_worker.layers.ffn import ExpertCalls
from expertmesh.v1 import attention_service_pb2 as pb


@dataclass
class StepTimes:
    """Seconds of one step so far."""

    sampling_s: float = 0.0
    """From the last layer's output to tokens."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The time inside counts as sampling."""
        started_s = time.monotonic()
        yield
        self.sampling_s += time.monotonic() - started_s

    def report(self, response: pb.StepResponse, duration_s: float, calls: ExpertCalls) -> None:
        """Tells them to the gateway, with the whole and what the calls of experts cost."""
        response.duration_us = _microseconds(duration_s)
        response.expert_wait_us = _microseconds(calls.wait_s)
        response.dispatch_us = _microseconds(calls.dispatch_s)
        response.sampling_us = _microseconds(self.sampling_s)


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
