"""One step of the scheduler, as a transaction: deltas, forward pass, sampling, commit.

Owner: one thread, that of the Run stream. A step either commits (STATUS_DONE) or leaves lengths
and tokens as they were; then the gateway repeats its work under a new step number. What stays
of an abandoned step are its deltas (see `step_deltas.py`) and rewritable KV rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.batch import Batch, Schedule, make_batch
from attention_worker.drafts import Speculation, make_drafter
from attention_worker.experts import ExpertClient
from attention_worker.gate_counts import GateCounts
from attention_worker.grammar import GrammarMasker, PendingMasks
from attention_worker.layers.ffn import ExpertCalls
from attention_worker.losses import LethalStepError
from attention_worker.micro_batches import ForwardPasses
from attention_worker.model import Model
from attention_worker.model_states.model_state import ModelState
from attention_worker.overlap import SplitByTimes, Splitter
from attention_worker.prompt_logprobs import prompt_logprobs
from attention_worker.request_slots import RequestSlots
from attention_worker.routed_experts import routing_recorder
from attention_worker.sampler import ChosenTokens, choose_tokens, no_tokens
from attention_worker.stages import choose_stages
from attention_worker.step_deltas import MalformedStepError, StepDeltas
from attention_worker.step_times import StepTimes
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2

logger = logging.getLogger(__name__)

LogitsObserver = Callable[[npt.NDArray[np.int64], Tensor], None]
"""Takes request slots [R] and their logits, float32 [R, V]; must not keep or change them."""


@dataclass(frozen=True)
class RunnerLimits:
    """How much a runner takes."""

    num_request_slots: int
    """Most requests that are known at a time."""
    max_step_tokens: int
    """Most tokens of one step."""
    expert_call_timeout_s: float = 30.0
    """Longest time of one layer's call to the experts, in seconds."""
    speculation: Speculation = field(default_factory=Speculation)
    """How many tokens are proposed to be verified together."""


def ignore_logits(slots_R: npt.NDArray[np.int64], logits_RV: Tensor) -> None:
    """The observer that is there by default."""


class ModelRunner:
    """Executes steps of one model. The longest sequence is `model.max_model_len`."""

    def __init__(
        self,
        model: Model,
        experts: ExpertClient,
        state: ModelState,
        limits: RunnerLimits,
        grammars: GrammarMasker,
        splitter: Splitter | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.limits = limits
        self.grammars = grammars
        self.gate_counts = GateCounts(model.config)
        self.on_logits: LogitsObserver = ignore_logits
        self._experts = experts
        self.stages = choose_stages(model, experts)
        self._passes = ForwardPasses(model, self.stages, state, splitter or SplitByTimes())
        self._slots = RequestSlots(limits.num_request_slots, model.max_model_len)
        self._deltas = StepDeltas(
            self._slots, state, model.config.vocab_size, limits.max_step_tokens
        )
        self._drafter = make_drafter(limits.speculation, limits.num_request_slots)
        self._last_step = -1
        self._last_committed = 0

    def reset(self) -> None:
        """Forgets all requests: a new gateway knows none of them."""
        self._deltas.reset()
        self._last_step = -1
        self._last_committed = 0

    def execute(self, step: pb.StepRequest) -> pb.StepResponse:
        """Executes one step; every outcome is in the response's status, nothing is raised.

        STATUS_DONE: one sampled token per request with `sample`, and one more for each accepted
        draft; requests in `nonfinite_slots` and `failures` get none.
        STATUS_PAUSED: `missing` experts have no usable copy.
        STATUS_LETHAL: expert workers were lost with rows of `suspect_slots` in `lethal_layer`.
        STATUS_SKIPPED: the step that it builds on was not committed.
        STATUS_FAILED: the step is malformed, or computing it failed; the message says how.
        """
        started_s = time.monotonic()
        times = StepTimes()
        calls = self._expert_calls(step, started_s)
        try:
            response = self._execute(step, calls, times)
        except MalformedStepError as error:
            response = _failed(f"malformed step: {error}")
        except ExpertUnavailableError as error:
            response = _paused(error)
        except LethalStepError as error:
            response = _lethal(error)
        except Exception as error:  # a step that fails must not take other requests with it
            logger.exception("step %d failed", step.step)
            response = _failed(f"{type(error).__name__}: {error}")
        response.step = step.step
        times.report(response, time.monotonic() - started_s, calls)
        return response

    def _execute(
        self, step: pb.StepRequest, calls: ExpertCalls, times: StepTimes
    ) -> pb.StepResponse:
        if step.step <= self._last_step:
            raise MalformedStepError(f"number {step.step}, expected more than {self._last_step}")
        self._last_step = step.step
        if step.after_step and step.after_step != self._last_committed:
            self._deltas.skip(step)
            return pb.StepResponse(status=pb.StepResponse.STATUS_SKIPPED)
        response = self._compute(step, calls, times)
        self._last_committed = step.step
        return response

    def _compute(
        self, step: pb.StepRequest, calls: ExpertCalls, times: StepTimes
    ) -> pb.StepResponse:
        schedule = self._deltas.apply(step)
        if not len(schedule.slots_S):
            return pb.StepResponse(status=pb.StepResponse.STATUS_DONE)
        self._experts.begin_step(step.step, cautious=step.cautious)
        batch = make_batch(schedule, self._slots, self.model.device)
        calls.recorder = routing_recorder(schedule, batch, self._slots)
        masks = self.grammars.start(batch.sample, self._slots)
        h_TH = self._forward(schedule, batch, calls)
        response = pb.StepResponse(
            status=pb.StepResponse.STATUS_DONE,
            prompt_logprobs=prompt_logprobs(self.model, h_TH, schedule, batch, self._slots),
            degraded_slots=sorted(calls.degraded_slots),
        )
        with times.sampling():
            tokens = self._sample(batch, h_TH, masks, response)
        num_computed_S = schedule.num_tokens_S.copy()
        num_computed_S[schedule.sample_S] -= tokens.num_rejected_P
        response.routed_experts.extend(calls.recorder.messages(num_computed_S))
        self._slots.commit_computed(schedule.slots_S, num_computed_S)  # from here on it counts
        self.state.commit(schedule.slots_S, num_computed_S)
        tokens.commit(self._slots)
        self.gate_counts.add(calls.choices)
        response.drafts.extend(self._drafter.propose(tokens, self._slots))
        return response

    def _expert_calls(self, step: pb.StepRequest, started_s: float) -> ExpertCalls:
        limit_s = step.time_limit_ms / 1000 if step.time_limit_ms else float("inf")
        return ExpertCalls(
            client=self._experts,
            timeout_s=self.limits.expert_call_timeout_s,
            step_deadline_s=started_s + limit_s,
        )

    def _forward(self, schedule: Schedule, batch: Batch, calls: ExpertCalls) -> Tensor:
        """Normalised hidden states of all rows after the last layer, [T, H]."""
        with torch.inference_mode():
            return self._passes.run(schedule, batch, calls)

    def _sample(
        self, batch: Batch, h_TH: Tensor, masks: PendingMasks, response: pb.StepResponse
    ) -> ChosenTokens:
        """Tokens of the sequences that are due one; the response tells them."""
        if not len(batch.sample):
            return no_tokens(batch.sample)
        logits_RV = self._sample_logits(batch, h_TH)
        tokens = choose_tokens(logits_RV, batch.sample, self._slots, masks.result())
        tokens.report(response, logits_RV, self._slots)
        return tokens

    def _sample_logits(self, batch: Batch, h_TH: Tensor) -> Tensor:
        """Logits to sample from, float32 [R, V], on the host."""
        with torch.inference_mode():
            logits_RV = self.model.logits(h_TH, batch.sample_rows_R)
        self.on_logits(batch.sample.slots_R, logits_RV)
        return logits_RV.cpu()


def _failed(message: str) -> pb.StepResponse:
    return pb.StepResponse(status=pb.StepResponse.STATUS_FAILED, message=message)


def _paused(error: ExpertUnavailableError) -> pb.StepResponse:
    return pb.StepResponse(
        status=pb.StepResponse.STATUS_PAUSED,
        message=str(error),
        missing=[
            expert_service_pb2.ExpertId(layer=layer, expert=expert)
            for layer, expert in error.missing
        ],
    )


def _lethal(error: LethalStepError) -> pb.StepResponse:
    return pb.StepResponse(
        status=pb.StepResponse.STATUS_LETHAL,
        message=str(error),
        suspect_slots=error.slots,
        lethal_layer=error.layer,
    )
