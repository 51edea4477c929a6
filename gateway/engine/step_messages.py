"""Scheduler decisions as messages of the AttentionService, and its answers as our own values."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from expertmesh.errors import EngineError, RequestError
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.output_stream import NewToken
from gateway.engine.request_state import ScheduledEntry, ScheduledStep, SlotOpening
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.sequence import SamplingParams, TokenLogprobs


def step_message(
    step: ScheduledStep,
    time_limit_ms: int,
    eos_token_ids: Collection[int] = (),
    *,
    after_step: int = 0,
) -> pb.StepRequest:
    """A step for the attention worker.

    Args:
        step: What the scheduler decided.
        time_limit_ms: For computing it; 0 for none.
        eos_token_ids: Tokens that end an output, unless a request ignores them.
        after_step: Number of the step that it builds on, while that is in flight; 0 means none.
    """
    return pb.StepRequest(
        step=step.step,
        freed_slots=step.freed_slots,
        new_requests=[_new_request(opening, eos_token_ids) for opening in step.opened],
        scheduled=[_scheduled(entry) for entry in step.entries],
        time_limit_ms=time_limit_ms,
        after_step=after_step,
        cautious=step.cautious,
    )


def limits_of(description: pb.DescribeResponse) -> SchedulerLimits:
    """What the attention worker says it has room for."""
    return SchedulerLimits(
        num_kv_blocks=description.num_kv_blocks,
        kv_block_size=description.kv_block_size,
        num_request_slots=description.num_request_slots,
        max_step_tokens=description.max_step_tokens,
        model_len=description.max_model_len,
        sliding_windows=tuple(group.sliding_window or None for group in description.kv_groups),
    )


def new_token(token: pb.SampledToken) -> NewToken:
    """A sampled token, with log probabilities if they were asked for."""
    if not token.HasField("logprob"):
        return NewToken(token.token_id)
    top = tuple((candidate.token_id, candidate.logprob) for candidate in token.top_logprobs)
    return NewToken(token.token_id, TokenLogprobs(token.token_id, token.logprob, top))


def tokens_by_slot(response: pb.StepResponse) -> dict[int, list[NewToken]]:
    """Sampled tokens per request slot; none of slots whose logits were not finite."""
    unusable = set(response.nonfinite_slots)
    found: dict[int, list[NewToken]] = {}
    for token in response.sampled:
        if token.slot not in unusable:
            found.setdefault(token.slot, []).append(new_token(token))
    return found


def slot_errors(response: pb.StepResponse) -> dict[int, Exception]:
    """Why requests of a computed step cannot go on, per request slot."""
    nonfinite = EngineError("the model's output is not a finite number")
    errors: dict[int, Exception] = dict.fromkeys(response.nonfinite_slots, nonfinite)
    errors |= dict.fromkeys(_slots_without_numbers(response), nonfinite)
    return errors | {failure.slot: RequestError(failure.message) for failure in response.failures}


def _slots_without_numbers(response: pb.StepResponse) -> set[int]:
    """Slots of prompts with a log probability that is not a number."""
    return {
        piece.slot
        for piece in response.prompt_logprobs
        if np.isnan(np.frombuffer(piece.logprobs, "<f4")).any()
    }


def _new_request(opening: SlotOpening, eos_token_ids: Collection[int]) -> pb.NewRequest:
    return pb.NewRequest(
        slot=opening.slot,
        token_ids=np.asarray(opening.token_ids, dtype="<i4").tobytes(),
        num_prompt_tokens=opening.num_prompt_tokens,
        num_cached=opening.num_cached,
        sampling=_sampling(opening.params, eos_token_ids),
    )


def _sampling(params: SamplingParams, eos_token_ids: Collection[int]) -> pb.SamplingSpec:
    ends = set(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
    return pb.SamplingSpec(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        num_logprobs=params.num_logprobs,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[
            pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias
        ],
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[pb.TokenSequence(ids=word) for word in params.bad_words],
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(ends),
        grammar=params.grammar,
        num_prompt_logprobs=params.num_prompt_logprobs,
        return_routed_experts=params.return_routed_experts,
    )


def _scheduled(entry: ScheduledEntry) -> pb.ScheduledRequest:
    return pb.ScheduledRequest(
        slot=entry.slot,
        start=entry.start,
        num_tokens=entry.num_tokens,
        new_blocks=[pb.BlockAppend(**append._asdict()) for append in entry.new_blocks],
        sample=entry.sample,
    )
