"""Where the time of a step goes, measured with a clock reading here and there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from attention_worker.experts import ExpertClient, Pending
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.router import Routing


@dataclass
class StepTimes:
    """Seconds of one step so far."""

    dispatch_s: float = 0.0
    """Handing rows to experts."""
    sampling_s: float = 0.0
    """From the last layer's output to tokens."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The time inside counts as sampling."""
        started_s = time.monotonic()
        yield
        self.sampling_s += time.monotonic() - started_s

    def report(self, response: pb.StepResponse, duration_s: float, expert_wait_s: float) -> None:
        """Tells them to the gateway, with the whole and the time spent waiting for experts."""
        response.duration_us = _microseconds(duration_s)
        response.expert_wait_us = _microseconds(expert_wait_s)
        response.dispatch_us = _microseconds(self.dispatch_s)
        response.sampling_us = _microseconds(self.sampling_s)


@dataclass(frozen=True)
class TimedExperts:
    """An expert client whose dispatches are timed."""

    client: ExpertClient
    times: StepTimes

    def begin_step(self, step: int) -> None:
        """See ExpertClient."""
        self.client.begin_step(step)

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """See ExpertClient."""
        started_s = time.monotonic()
        pending = self.client.dispatch(layer, h_TH, routing, num_generated_rows, deadline_s)
        self.times.dispatch_s += time.monotonic() - started_s
        return pending


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
