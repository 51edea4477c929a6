"""Steps on their way to one attention worker: the next one is sent while one is computed.

Results come in the order of the steps. A step that is abandoned takes those behind it with it: each
names the one it builds on, so the attention worker skips them, and their work is scheduled again.

Owner: the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from expertmesh.errors import PeerError
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.attention.port import AttentionPort
from gateway.engine.request_state import ScheduledStep
from gateway.engine.scheduler import Scheduler
from gateway.engine.step_messages import step_message

_STEP_LIMIT_SHARE = 0.9  # its own time limit, so that it answers before it counts as hung


@dataclass
class Flight:
    """A step that was sent, and its result once that is there."""

    step: ScheduledStep
    response: pb.StepResponse


class StepPipeline:
    """Steps in flight.

    Args:
        attention: Where they go.
        depth: Most steps in flight.
        timeout_s: Longest time for the oldest one.
        eos_token_ids: Tokens that end an output.
    """

    def __init__(
        self,
        attention: AttentionPort,
        depth: int,
        timeout_s: float,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._attention = attention
        self._depth = depth
        self._timeout_s = timeout_s
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limit_ms = max(1, int(timeout_s * _STEP_LIMIT_SHARE * 1000))
        self._in_flight: deque[ScheduledStep] = deque()

    @property
    def busy(self) -> bool:
        """True while a result is due."""
        return bool(self._in_flight)

    @property
    def full(self) -> bool:
        """True if no further step should be sent."""
        return len(self._in_flight) >= self._depth

    def send(self, step: ScheduledStep) -> None:
        """Sends a step. Raises PeerError if the attention worker is down."""
        after = self._in_flight[-1].step if self._in_flight else 0
        self._attention.send(
            step_message(step, self._limit_ms, self._eos_token_ids, after_step=after)
        )
        self._in_flight.append(step)

    def receive(self) -> Flight:
        """The oldest step with its result; waits for it. Raises PeerError if it does not come."""
        response = self._attention.receive(self._timeout_s)
        step = self._in_flight.popleft()
        if response.step != step.step:
            raise PeerError(f"attention worker answered step {response.step}, expected {step.step}")
        return Flight(step, response)

    def abandon(self, scheduler: Scheduler) -> None:
        """Takes back the steps behind one that was not committed.

        Raises:
            PeerError: The attention worker computed one of them all the same.
        """
        for step in reversed(self._in_flight):
            scheduler.rewind(step)
        while self._in_flight:
            flight = self.receive()
            if flight.response.status != pb.StepResponse.STATUS_SKIPPED:
                status = pb.StepResponse.Status.Name(flight.response.status)
                raise PeerError(
                    f"attention worker answered {status} to step {flight.step.step}, which builds "
                    "on an abandoned one"
                )

    def clear(self) -> None:
        """Nothing comes back any more."""
        self._in_flight.clear()
