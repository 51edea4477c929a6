"""From sampled tokens to the outputs of one request: text, stop conditions, times.

Owner: the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gateway.engine.engine_observer import EngineObserver, RequestTimes
from gateway.engine.request_state import RequestState
from gateway.engine.token_records import prompt_logprobs_record, routed_experts_record
from gateway.sequence import FinishReason, RequestOutput, TokenLogprobs
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer

_Reading = tuple[str, FinishReason | None, str | int | None]
"""Text, why the output ends here if it does, and what ended it."""


@dataclass(frozen=True)
class NewToken:
    """A token that was sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """If asked for."""


class OutputStream:
    """Outputs of one request, in order; the last one has a finish reason.

    Args:
        state: The request.
        tokenizer: For text and stop strings; None without one.
        eos_token_ids: Tokens that end the output.
        observer: Told about tokens and the end.
    """

    def __init__(
        self,
        state: RequestState,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        observer: EngineObserver,
    ) -> None:
        self.state = state
        self.request = state.request
        self._params = params = state.request.params
        self.prompt_logprobs = prompt_logprobs_record(params, state.request.prompt_token_ids)
        self.routed_experts = routed_experts_record(params)
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._eos_token_ids = () if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._observer = observer
        self.is_degraded = False
        """Something was computed without an expert that nobody had."""
        self._num_generated = 0
        self._last_s: float | None = None
        self._started_s: float | None = None
        self._first_s = 0.0

    def started(self) -> None:
        """The request got a request slot."""
        if self._started_s is None:
            self._started_s = time.monotonic()
            self._observer.request_started(self.request, self._started_s - self.request.arrival_s)

    def push(self, tokens: Sequence[NewToken], max_model_len: int) -> RequestOutput:
        """Output for the newest tokens, with a finish reason if it ends at one of them.

        Args:
            tokens: Ids and log probabilities. What follows the last token of the output is dropped.
            max_model_len: Longest sequence, prompt and output together.
        """
        first = self._num_generated == 0
        text = ""
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        used: list[NewToken] = []
        for token in tokens:
            used.append(token)
            self._num_generated += 1
            more, reason, stop_reason = self._read(token.token_id, max_model_len)
            text += more
            if reason is not None:
                break
        self._note_tokens(len(used))
        output = RequestOutput(
            request_id=self.request.request_id,
            token_ids=tuple(token.token_id for token in used),
            text=text,
            logprobs=tuple(token.logprobs for token in used if token.logprobs is not None),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.state.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs.whole() if first else None,
            is_degraded=self.is_degraded,
        )
        if reason is None:
            return output
        self._note_end(reason)
        return replace(output, routed_experts=self._experts())

    def end(self, reason: FinishReason, error: Exception | None = None) -> RequestOutput:
        """Last output of a request that ends without a further token."""
        self._note_end(reason)
        return RequestOutput(
            self.request.request_id,
            text=self._detokenizer.flush() if self._num_generated else "",
            finish_reason=reason,
            error=error,
            num_cached_tokens=self.state.num_cached_tokens,
        )

    def _read(self, token_id: int, max_model_len: int) -> _Reading:
        generated = self._num_generated
        if generated > self._params.min_tokens:
            if token_id in self._stop_token_ids:
                return self._text_at_stop(token_id), FinishReason.STOP, token_id
            if token_id in self._eos_token_ids:
                return self._text_at_stop(token_id), FinishReason.STOP, None
        can_stop = generated >= self._params.min_tokens
        push = self._detokenizer.push if can_stop else self._detokenizer.push_unchecked
        update = push(token_id)
        if update.stop_reason is not None:
            return update.text, FinishReason.STOP, update.stop_reason
        full = self.state.num_prompt_tokens + generated >= max_model_len
        if full or generated >= self._params.max_tokens:
            return update.text + self._detokenizer.flush(), FinishReason.LENGTH, None
        return update.text, None, None

    def _text_at_stop(self, token_id: int) -> str:
        """The rest of the text at a token that ends the output."""
        if not self._params.include_stop_str_in_output:
            return self._detokenizer.flush()
        return self._detokenizer.push(token_id).text + self._detokenizer.flush()

    def _experts(self) -> npt.NDArray[np.uint16] | None:
        """Of all tokens but the last, which was not computed."""
        return self.routed_experts.whole(self.state.num_prompt_tokens + self._num_generated - 1)

    def _note_tokens(self, num_tokens: int) -> None:
        """Tells when tokens came; those of one step came at the same time."""
        now = time.monotonic()
        if self._last_s is None:
            self._observer.first_token(self.request, now - self.request.arrival_s)
            self._first_s = self._last_s = now
            num_tokens -= 1
        for _ in range(num_tokens):
            self._observer.next_token(self.request, now - self._last_s)
            self._last_s = now

    def _note_end(self, reason: FinishReason) -> None:
        now_s = time.monotonic()
        since_s = now_s - self.request.arrival_s
        if self._started_s is not None and self._num_generated:
            times = RequestTimes(
                prefill_s=self._first_s - self._started_s,
                decode_s=now_s - self._first_s,
                num_generated=self._num_generated,
                num_cached_tokens=self.state.num_cached_tokens,
            )
            self._observer.request_timed(self.request, times)
        self._observer.request_finished(self.request, reason, self._num_generated, since_s)
