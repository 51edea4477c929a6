"""Scheduler decisions as messages of the AttentionService, and its answers as our own values."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.request_state import ScheduledEntry, ScheduledStep, SlotOpening
from gateway.scheduler import SchedulerLimits
from gateway.sequence import SamplingParams, TokenLogprobs


def step_message(
    step: ScheduledStep, time_limit_ms: int, eos_token_ids: Collection[int] = ()
) -> pb.StepRequest:
    """A step for the attention worker.

    Args:
        step: What the scheduler decided.
        time_limit_ms: 0 for none.
        eos_token_ids: Tokens that end an output, unless a request ignores them.
    """
    return pb.StepRequest(
        step=step.step,
        freed_slots=step.freed_slots,
        new_requests=[_new_request(opening, eos_token_ids) for opening in step.opened],
        scheduled=[_scheduled(entry) for entry in step.entries],
        time_limit_ms=time_limit_ms,
    )


def limits_of(description: pb.DescribeResponse) -> SchedulerLimits:
    """What the attention worker says it has room for."""
    return SchedulerLimits(
        num_kv_blocks=description.num_kv_blocks,
        kv_block_size=description.kv_block_size,
        num_request_slots=description.num_request_slots,
        max_step_tokens=description.max_step_tokens,
        model_len=description.max_model_len,
    )


def token_logprobs(token: pb.SampledToken) -> TokenLogprobs | None:
    """Log probabilities of a sampled token; None if they were not asked for."""
    if not token.HasField("logprob"):
        return None
    top = tuple((candidate.token_id, candidate.logprob) for candidate in token.top_logprobs)
    return TokenLogprobs(token.token_id, token.logprob, top)


def _new_request(opening: SlotOpening, eos_token_ids: Collection[int]) -> pb.NewRequest:
    return pb.NewRequest(
        slot=opening.slot,
        token_ids=np.asarray(opening.token_ids, dtype="<i4").tobytes(),
        num_prompt_tokens=opening.num_prompt_tokens,
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
        new_block_ids=entry.new_block_ids,
        sample=entry.sample,
    )
