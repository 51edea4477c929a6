"""What the engine tells about requests and steps, for metrics.

The base class does nothing. Methods are called in the engine thread, in the order of the events,
and must not block or raise. Times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.sequence import FinishReason, GenerationRequest


@dataclass(frozen=True)
class RequestTimes:
    """Where the time of a request that got a token went."""

    prefill_s: float
    """From its first request slot to its first token."""
    decode_s: float
    """From its first token to its end."""
    num_generated: int
    """Tokens; at least 1."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


class EngineObserver:
    """Ignores everything."""

    def request_started(self, request: GenerationRequest, queue_s: float) -> None:
        """A request got its first request slot, this long after its arrival."""

    def request_preempted(self, request: GenerationRequest) -> None:
        """A request lost its KV blocks and will be computed again."""

    def first_token(self, request: GenerationRequest, since_arrival_s: float) -> None:
        """The first token was sampled."""

    def next_token(self, request: GenerationRequest, since_last_s: float) -> None:
        """A further token was sampled."""

    def request_timed(self, request: GenerationRequest, times: RequestTimes) -> None:
        """A request that got a token ends; `request_finished` follows."""

    def request_finished(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        num_generated: int,
        since_arrival_s: float,
    ) -> None:
        """A request ended, for whatever reason."""

    def step_done(self, num_tokens: int, duration_s: float, expert_wait_s: float) -> None:
        """A step was committed."""

    def step_paused(self, missing: tuple[tuple[int, int], ...]) -> None:
        """A step was abandoned, since these (layer, expert) pairs had no usable copy."""

    def step_lethal(self, layer: int) -> None:
        """A step was abandoned, since expert workers were lost with the same rows of this layer."""

    def request_quarantined(self, request: GenerationRequest, layer: int) -> None:
        """A request ends, since expert workers are lost with its rows of this layer."""

    def engine_failed(self, message: str) -> None:
        """The attention worker was lost, or a step failed."""


class ObserverPair(EngineObserver):
    """Tells two observers of everything, one after the other."""

    def __init__(self, one: EngineObserver, other: EngineObserver) -> None:
        self._both = (one, other)

    def request_started(self, request: GenerationRequest, queue_s: float) -> None:
        """Tells both."""
        for observer in self._both:
            observer.request_started(request, queue_s)

    def request_preempted(self, request: GenerationRequest) -> None:
        """Tells both."""
        for observer in self._both:
            observer.request_preempted(request)

    def first_token(self, request: GenerationRequest, since_arrival_s: float) -> None:
        """Tells both."""
        for observer in self._both:
            observer.first_token(request, since_arrival_s)

    def next_token(self, request: GenerationRequest, since_last_s: float) -> None:
        """Tells both."""
        for observer in self._both:
            observer.next_token(request, since_last_s)

    def request_timed(self, request: GenerationRequest, times: RequestTimes) -> None:
        """Tells both."""
        for observer in self._both:
            observer.request_timed(request, times)

    def request_finished(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        num_generated: int,
        since_arrival_s: float,
    ) -> None:
        """Tells both."""
        for observer in self._both:
            observer.request_finished(request, reason, num_generated, since_arrival_s)

    def step_done(self, num_tokens: int, duration_s: float, expert_wait_s: float) -> None:
        """Tells both."""
        for observer in self._both:
            observer.step_done(num_tokens, duration_s, expert_wait_s)

    def step_paused(self, missing: tuple[tuple[int, int], ...]) -> None:
        """Tells both."""
        for observer in self._both:
            observer.step_paused(missing)

    def step_lethal(self, layer: int) -> None:
        """Tells both."""
        for observer in self._both:
            observer.step_lethal(layer)

    def request_quarantined(self, request: GenerationRequest, layer: int) -> None:
        """Tells both."""
        for observer in self._both:
            observer.request_quarantined(request, layer)

    def engine_failed(self, message: str) -> None:
        """Tells both."""
        for observer in self._both:
            observer.engine_failed(message)
