"""The load of an engine, as other threads may see it."""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.inbox import EngineLoad
from gateway.engine.scheduler import Scheduler
from gateway.sequence import EngineStats


@dataclass
class EngineCounters:
    """What happened since the start. Owner: the engine thread."""

    num_preemptions: int = 0
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    num_steps: int = 0
    step_us: int = 0
    dispatch_us: int = 0
    expert_wait_us: int = 0
    sampling_us: int = 0

    def add(self, response: pb.StepResponse) -> None:
        """Counts a committed step."""
        self.num_drafts_verified += response.num_drafts_verified
        self.num_drafts_accepted += response.num_drafts_accepted
        self.num_steps += 1
        self.step_us += response.duration_us
        self.dispatch_us += response.dispatch_us
        self.expert_wait_us += response.expert_wait_us
        self.sampling_us += response.sampling_us


def queue_load(scheduler: Scheduler) -> EngineLoad:
    """What the door must know to refuse what cannot wait."""
    return EngineLoad(
        len(scheduler.waiting), scheduler.num_waiting_tokens, scheduler.num_free_slots
    )


def engine_stats(scheduler: Scheduler, counters: EngineCounters) -> EngineStats:
    """What people and metrics see."""
    slots = scheduler.limits.num_request_slots
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_blocks_used=scheduler.blocks.num_used,
        kv_blocks_total=scheduler.blocks.num_blocks,
        request_slots_used=slots - scheduler.num_free_slots,
        request_slots_total=slots,
        num_prefix_queried=scheduler.num_prefix_queried,
        num_prefix_hit=scheduler.num_prefix_hit,
        **vars(counters),
    )
