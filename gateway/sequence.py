"""The vocabulary of the gateway: requests, sampling parameters, and the engine's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of a request are chosen and when it ends. Validated at the door."""

    max_tokens: int
    """Most tokens to generate; at least 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    seed: int = 0
    """64-bit; the door draws one at random where the client gives none."""
    min_p: float = 0.0
    """Tokens with less than this share of the largest probability are not chosen; 0 means off."""
    repetition_penalty: float = 1.0
    """Of tokens in prompt or output; 1 means off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, times their number."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that do not occur in the output."""
    min_tokens: int = 0
    """No stop token, and no stop string, before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides those of the model."""
    include_stop_str_in_output: bool = False
    """The stop string, or the text of the stop token, is part of the output."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""
    num_logprobs: int | None = None
    """None: no log probabilities; 0: of the sampled token only."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    return_routed_experts: bool = False
    """The experts of each token are returned."""
    grammar: str = ""
    """What the output must match, as llguidance writes grammars; empty: anything."""


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a sampled token, and the most likely tokens, descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request. `text` holds whole characters only."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token of the request, that ended the output, if one did."""
    error: Exception | None = None
    """Set with FinishReason.ERROR."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; the same in every output."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token, None for the first; with the first output, if asked for."""
    routed_experts: npt.NDArray[np.uint16] | None = None
    """[num tokens - 1, MoE layers, top-k] of prompt and output; with the last output, if asked
    for."""
    is_degraded: bool = False
    """Something so far was computed without an expert that the gate chose, as nobody had it."""


Sink = Callable[[RequestOutput], None]
"""Takes outputs of one request; called in the event loop's thread."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request as it enters the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sink: Sink
    arrival_s: float
    """time.monotonic() at the door."""
    priority: int = 0
    """Lower goes first: each level counts as much as some seconds of arrival."""
    deadline_s: float | None = None
    """On the monotonic clock; the request ends with a DeadlineError then."""
    cache_salt: str = ""
    """Prefixes are shared only between requests with the same salt."""
    call_id: str = ""
    """Of the call that it is a part of, as its client knows it; for the log."""


@dataclass(frozen=True)
class DispatchStats:
    """Totals of the calls to one expert worker since the gateway started."""

    worker_id: str
    calls: int = 0
    faults: int = 0
    """Calls that were late or failed."""
    hedges: int = 0
    """Late calls whose rows were asked of other copies too."""
    retries: int = 0
    """Failed calls whose rows were asked of other copies."""
    late_replies: int = 0
    """Replies that came too late or twice."""
    ejections: int = 0
    """Times that it was not asked for a while, since it was silent or wrong."""
    damaged: int = 0
    """Calls and replies that were changed on the way, as their checksums tell."""
    late_calls: int = 0
    """Calls that were not answered within three times what such calls take."""
    retry_causes: Mapping[str, int] = field(default_factory=dict)
    """`retries` by cause: late, lost, damaged or refused."""
    rows_out: int = 0
    """Token rows sent."""
    rows_back: int = 0
    """Rows received: one per (token, expert)."""
    bytes_out: int = 0
    bytes_back: int = 0
    round_trip_s: float = 0.0
    """Sum over the calls."""
    compute_s: float = 0.0
    """Part of it that the expert worker reports as computing."""
    slowness: float = 0.0
    """How long its calls take of late, to what such calls take; 0 if that is not known."""
    last_fault: str = ""
    """Why the latest of `faults` was one."""


@dataclass(frozen=True)
class EngineStats:
    """Load of the engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    request_slots_used: int = 0
    request_slots_total: int = 0
    alive: bool = True
    """False once the engine can no longer serve."""
    num_preemptions: int = 0
    """Since the gateway started, as all that follows."""
    num_prefix_queried: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hit: int = 0
    """Part of them that was found."""
    num_drafts_verified: int = 0
    """Speculative tokens that were verified."""
    num_drafts_accepted: int = 0
    """Part of them that was accepted."""
    num_steps: int = 0
    """Steps that were committed."""
    step_us: int = 0
    """Time that the attention workers took for them, in microseconds."""
    dispatch_us: int = 0
    """Part of it for handing rows to experts."""
    expert_wait_us: int = 0
    """Part of it for waiting for expert workers."""
    sampling_us: int = 0
    """Part of it from the last layer's output to tokens."""
    dispatch: tuple[DispatchStats, ...] = ()
    num_dropped_pairs: int = 0
    """(row, expert) pairs left out, as nobody had the expert and that is allowed."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


class EnginePort(Protocol):
    """What the APIs need of the engine; every method may be called from any thread."""

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; its outputs go to its sink, the last one with a finish reason.

        Raises:
            OverloadedError: The queue is full, or the engine cannot take requests at the moment.
            ContextLengthError: The request can never fit.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT; no effect on one that is unknown or ended."""

    def stats(self) -> EngineStats:
        """Load at this moment."""
