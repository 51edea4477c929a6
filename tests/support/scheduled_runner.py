"""The gateway's scheduler on top of a real model runner, in one process and step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attention_worker.model_runner import ModelRunner
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.request_state import RequestState
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits, SchedulerPolicy
from gateway.engine.step_messages import step_message, tokens_by_slot
from gateway.sequence import GenerationRequest, SamplingParams


class ScheduledRunner:
    """Serves requests and keeps the logits that each of their tokens was chosen from.

    Args:
        runner: What computes; its observer of logits is replaced.
        prefix_caching: KV blocks of earlier requests are used again.
    """

    def __init__(self, runner: ModelRunner, *, prefix_caching: bool = True) -> None:
        kv = runner.state.kv
        limits = SchedulerLimits(
            num_kv_blocks=kv.num_blocks,
            kv_block_size=kv.block_size,
            num_request_slots=runner.limits.num_request_slots,
            max_step_tokens=64,
            model_len=runner.model.max_model_len,
            sliding_windows=kv.sliding_windows,
        )
        self.scheduler = Scheduler(limits, SchedulerPolicy(prefix_caching))
        self.num_preemptions = 0
        self.logits: defaultdict[str, list[bytes]] = defaultdict(list)
        """Of each request, for each output token."""
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.num_cached: dict[str, int] = {}
        self._runner = runner
        self._slots: dict[int, str] = {}
        runner.reset()
        runner.on_logits = self._keep_logits

    def ask(
        self, name: str, prompt: Sequence[int], params: SamplingParams, salt: str = ""
    ) -> RequestState:
        """Queues a request."""
        return self.scheduler.add(
            GenerationRequest(
                name,
                tuple(prompt),
                params,
                lambda output: None,
                arrival_s=0.0,
                cache_salt=salt,
            )
        )

    def run(self) -> None:
        """Steps until every request has all its tokens."""
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_used == 0

    def step(self) -> None:
        """Schedules, executes and commits one step."""
        step = self.scheduler.schedule()
        assert step is not None
        self.num_preemptions += len(step.preempted)
        self._slots = {entry.slot: entry.state.request_id for entry in step.entries}
        response = self._runner.execute(step_message(step, 0))
        assert response.status == pb.StepResponse.STATUS_DONE, response.message
        tokens = tokens_by_slot(response)
        sampled = {slot: [token.token_id for token in new] for slot, new in tokens.items()}
        assert self.scheduler.commit(step, sampled) == []
        for state in list(self.scheduler.running):
            if state.num_generated >= state.request.params.max_tokens:
                self.outputs[state.request_id] = tuple(state.token_ids[state.num_prompt_tokens :])
                self.num_cached[state.request_id] = state.num_cached_tokens
                self.scheduler.finish(state.request_id)

    def _keep_logits(self, slots_R: npt.NDArray[np.int64], logits_RV: Tensor) -> None:
        for slot, logits_V in zip(slots_R.tolist(), logits_RV.cpu().numpy(), strict=True):
            self.logits[self._slots[slot]].append(logits_V.tobytes())
