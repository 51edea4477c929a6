"""One line of the log for each request that ended: who, how much, how long, why it ended.

Owner: the engine threads, which tell of their own requests. What a client has asked and what was
answered is in no line.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gateway.engine.engine_observer import EngineObserver, RequestTimes
from gateway.sequence import FinishReason, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass
class _Progress:
    """What was seen of a request that runs."""

    queue_s: float
    first_token_s: float | None = None
    num_cached_tokens: int = 0


class RequestLog(EngineObserver):
    """Writes the lines.

    Args:
        model_name: What the model is called.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._running: dict[str, _Progress] = {}

    def request_started(self, request: GenerationRequest, queue_s: float) -> None:
        """A request got its first request slot."""
        self._running[request.request_id] = _Progress(queue_s)

    def first_token(self, request: GenerationRequest, since_arrival_s: float) -> None:
        """The first token was sampled."""
        self._running[request.request_id].first_token_s = since_arrival_s

    def request_timed(self, request: GenerationRequest, times: RequestTimes) -> None:
        """Says how much of the prompt was cached."""
        self._running[request.request_id].num_cached_tokens = times.num_cached_tokens

    def request_finished(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        num_generated: int,
        since_arrival_s: float,
    ) -> None:
        """Writes the line of a request; one that never ran waited all the time."""
        progress = self._running.pop(request.request_id, None) or _Progress(since_arrival_s)
        first_s = progress.first_token_s
        first = "no token" if first_s is None else f"first token after {first_s:.3f} s"
        fields: dict[str, object] = {
            "request_id": request.request_id,
            "call_id": request.call_id,
            "model": self._model_name,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": progress.num_cached_tokens,
            "output_tokens": num_generated,
            "queue_s": round(progress.queue_s, 6),
            "ttft_s": None if first_s is None else round(first_s, 6),
            "total_s": round(since_arrival_s, 6),
            "finish_reason": reason.value,
        }
        logger.info(
            "request %s (%s) ended, %s: %d prompt tokens, %d of them cached, %d output tokens; "
            "%.3f s queued, %s, %.3f s in all",
            *(request.request_id, request.call_id, reason.value),
            *(len(request.prompt_token_ids), progress.num_cached_tokens, num_generated),
            *(progress.queue_s, first, since_arrival_s),
            extra={"fields": fields},
        )
