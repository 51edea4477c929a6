"""Decides what each step computes: one algorithm without phases.

Every request has tokens and a count of those computed; a step lets each catch up under a token
budget: running requests first, oldest first, then waiting ones, first come first served. A prompt
longer than the budget is computed in chunks. When KV blocks run out, the youngest running request
is preempted: its blocks and slot are freed, and it waits at the head of the queue to be computed
again (prompt and generated tokens; the same tokens follow).

`schedule` advances `num_computed` at once and `commit` appends the sampled tokens, so a step may be
scheduled while another one is in flight (its tokens are placeholders until then).

Why it ends: all running requests are older than all waiting ones, a preemption takes the youngest,
and a request that fits into the pool alone is the only kind admitted; so the oldest one always
advances.

Owner: the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from expertmesh.errors import ContextLengthError, RequestError
from gateway.block_manager import BlockManager
from gateway.request_state import RequestState, ScheduledEntry, ScheduledStep, SlotOpening
from gateway.sequence import GenerationRequest


@dataclass(frozen=True)
class SchedulerLimits:
    """What the attention worker has room for."""

    num_kv_blocks: int
    kv_block_size: int
    """Tokens of one KV block."""
    num_request_slots: int
    max_step_tokens: int
    model_len: int
    """Longest sequence that the model takes, prompt and output together."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence that can be served: of the model and of the KV cache."""
        return min(self.model_len, self.num_kv_blocks * self.kv_block_size)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raises RequestError for a prompt that can never be served."""
        if num_prompt_tokens < 1:
            raise RequestError("the prompt is empty, expected at least one token", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and one more is to be generated, but "
                f"prompt and output together can have {self.max_model_len}",
                param="prompt",
            )


class Scheduler:
    """Waiting and running requests, request slots and KV blocks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.running: list[RequestState] = []
        self.waiting: deque[RequestState] = deque()
        self._states: dict[str, RequestState] = {}
        self._step = 0
        self._use(limits)

    def _use(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits.num_kv_blocks, limits.kv_block_size)
        self._free_slots = list(range(limits.num_request_slots - 1, -1, -1))
        self._freed_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        """True while a request is known."""
        return bool(self._states)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests."""
        return sum(len(state.token_ids) for state in self.waiting)

    @property
    def num_free_slots(self) -> int:
        """Request slots that belong to nobody."""
        return len(self._free_slots)

    def add(self, request: GenerationRequest) -> RequestState:
        """Puts a request at the end of the queue. Raises RequestError if it can never fit."""
        self.limits.check_fits(len(request.prompt_token_ids))
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        state = RequestState(request)
        self._states[state.request_id] = state
        self.waiting.append(state)
        return state

    def get(self, request_id: str) -> RequestState | None:
        """The state of a known request."""
        return self._states.get(request_id)

    def schedule(self, *, admit: bool = True) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute.

        Args:
            admit: False keeps waiting requests waiting.
        """
        budget = self.limits.max_step_tokens
        entries, preempted = self._schedule_running(budget)
        budget -= sum(entry.num_tokens for entry in entries)
        admitted: list[RequestState] = []
        if admit and not preempted:  # what was just freed is for the requests that needed it
            self._admit(budget, entries, admitted)
        if not entries:
            return None
        self._step += 1
        freed, self._freed_slots = tuple(self._freed_slots), []
        opened = tuple(_opening(state) for state in admitted)
        return ScheduledStep(
            self._step, freed, opened, tuple(entries), tuple(preempted), tuple(admitted)
        )

    def commit(self, step: ScheduledStep, sampled: Mapping[int, int]) -> list[RequestState]:
        """Appends the sampled tokens of a step.

        Args:
            step: A step that was computed.
            sampled: Request slot to token id.

        Returns:
            Requests of which no token came although one was due; to be ended by the caller.
        """
        silent: list[RequestState] = []
        for entry in step.entries:
            if not (entry.sample and entry.current):
                continue
            entry.state.num_placeholders -= 1
            token_id = sampled.get(entry.slot)
            if token_id is None:
                silent.append(entry.state)
            else:
                entry.state.token_ids.append(token_id)
        return silent

    def rewind(self, step: ScheduledStep) -> None:
        """Forgets that a step was scheduled, so that the same work is scheduled again.

        Slots and blocks stay as they are: the attention worker keeps them from an abandoned step.
        """
        for entry in step.entries:
            if entry.current:
                entry.state.num_computed = entry.start
                entry.state.num_placeholders -= entry.sample

    def finish(self, request_id: str) -> RequestState | None:
        """Forgets a request and frees what it holds; None if it is unknown."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        if state.slot is None:
            self.waiting.remove(state)
        else:
            self._release(state)
        return state

    def reset(self, limits: SchedulerLimits) -> list[RequestState]:
        """Starts over with an attention worker that knows nothing; call when nothing runs.

        Returns:
            Waiting requests that can no longer fit; they are forgotten.
        """
        assert not self.running, f"{len(self.running)} requests run"
        self._use(limits)
        lost = [s for s in self.waiting if len(s.token_ids) >= limits.max_model_len]
        for state in lost:
            self.finish(state.request_id)
        return lost

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, slots and queues agree with each other."""
        self.blocks.check_integrity()
        slots = [state.slot for state in self.running if state.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.limits.num_request_slots))
        known = [state.request_id for state in (*self.running, *self.waiting)]
        assert sorted(known) == sorted(self._states)
        held = sum(len(self.blocks.table(state.request_id)) for state in self.running)
        assert held == self.blocks.num_used

    def _schedule_running(self, budget: int) -> tuple[list[ScheduledEntry], list[RequestState]]:
        entries: list[ScheduledEntry] = []
        preempted: list[RequestState] = []
        index = 0
        while index < len(self.running) and budget > 0:
            state = self.running[index]
            num_tokens = min(state.num_wanted(self.limits.max_model_len), budget)
            if num_tokens > 0:
                blocks = self._grow_or_preempt(state, state.num_computed + num_tokens, preempted)
                if blocks is None:
                    break  # it was the youngest itself
                entries.append(_advance(state, num_tokens, blocks))
                budget -= num_tokens
            index += 1
        return entries, preempted

    def _grow_or_preempt(
        self, state: RequestState, num_tokens: int, preempted: list[RequestState]
    ) -> tuple[int, ...] | None:
        """Blocks for a running request; None if it was preempted itself."""
        while True:
            blocks = self.blocks.grow(state.request_id, num_tokens)
            if blocks is not None:
                return blocks
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is state:
                return None

    def _admit(
        self, budget: int, entries: list[ScheduledEntry], admitted: list[RequestState]
    ) -> None:
        while self.waiting and self._free_slots and budget > 0:
            state = self.waiting[0]
            blocks = self.blocks.grow(state.request_id, len(state.token_ids))
            if blocks is None:
                return
            self.waiting.popleft()
            self.running.append(state)
            state.slot = self._free_slots.pop()
            state.life += 1
            admitted.append(state)
            num_tokens = min(len(state.token_ids), budget)
            entries.append(_advance(state, num_tokens, blocks))
            budget -= num_tokens

    def _preempt(self, state: RequestState) -> None:
        self._release(state)
        self.waiting.appendleft(state)

    def _release(self, state: RequestState) -> None:
        assert state.slot is not None
        self.running.remove(state)
        self.blocks.free(state.request_id)
        self._free_slots.append(state.slot)
        self._freed_slots.append(state.slot)
        state.slot = None
        state.num_computed = 0
        state.num_placeholders = 0


def _advance(state: RequestState, num_tokens: int, blocks: tuple[int, ...]) -> ScheduledEntry:
    """Schedules the next `num_tokens` tokens of a running request."""
    assert state.slot is not None
    start = state.num_computed
    known = len(state.token_ids) + state.num_placeholders
    sample = start + num_tokens == known
    state.num_computed = start + num_tokens
    state.num_placeholders += sample
    return ScheduledEntry(state, state.life, state.slot, start, num_tokens, blocks, sample)


def _opening(state: RequestState) -> SlotOpening:
    assert state.slot is not None
    return SlotOpening(
        state.slot, tuple(state.token_ids), state.num_prompt_tokens, state.request.params
    )
