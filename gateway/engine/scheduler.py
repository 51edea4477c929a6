"""Decides what each step computes: one algorithm without phases.

Every request has tokens and a count of those computed; a step lets each catch up under a token
budget: running requests first, then waiting ones, each kind in the order of their turns. A long
prompt is computed in chunks, small enough to leave every running request its next token and other
prompts a share. A waiting request is admitted only if all its tokens fit; in KV groups with a
window, what is behind it needs no room. When KV blocks run out, the running request whose turn is
last is preempted: its blocks and slot are freed, and it waits to be computed again (prompt and
generated tokens; the same tokens follow).

A turn is the arrival plus some seconds per level of priority: priorities order what is there now,
and nobody is overtaken for ever.

`schedule` advances `num_computed` at once and `commit` appends the sampled tokens, so a step may be
scheduled while another one is in flight (its tokens are placeholders until then). Blocks behind a
window are freed at commit, counted from the committed tokens: steps in flight do not see them, and
an abandoned step can be scheduled again.

Why it ends: a preemption takes the last turn and only requests that fit into the pool alone are
taken, so the running request with the first turn always advances: alone, it has room for the next
step once none is in flight, since its committed tokens hold no more than a window then. Until that
it waits, as does the last one of several, and each step in flight comes back. No waiting request is
overtaken by one with a later turn, so each becomes the first one.

Owner: the engine thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from expertmesh.errors import RequestError
from gateway.engine.block_manager import BlockAppend, BlockManager
from gateway.engine.prefix_cache import HashedPrefixCache, NoPrefixCache, PrefixCache
from gateway.engine.request_state import (
    RequestState,
    ScheduledEntry,
    ScheduledStep,
    advance,
    commit_entry,
    opening,
)
from gateway.engine.scheduler_limits import SchedulerLimits, SchedulerPolicy
from gateway.sequence import GenerationRequest

_turn = attrgetter("turn")


class Scheduler:
    """Waiting and running requests, request slots and KV blocks.

    Args:
        limits: What the attention worker has room for.
        policy: Choices of the operator.
    """

    def __init__(self, limits: SchedulerLimits, policy: SchedulerPolicy | None = None) -> None:
        self.running: list[RequestState] = []
        """In the order of their turns."""
        self.waiting: list[RequestState] = []
        """In the order of their turns."""
        self.num_prefix_queried = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.num_prefix_hit = 0
        """Part of them that was found."""
        self._policy = policy or SchedulerPolicy()
        self._states: dict[str, RequestState] = {}
        self._num_added = 0
        self._step = 0
        self._use(limits)

    def _use(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits.num_kv_blocks, limits.kv_groups, limits.max_step_tokens)
        self._prefixes: PrefixCache = (
            HashedPrefixCache() if self._policy.prefix_caching else NoPrefixCache()
        )
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

    @property
    def states(self) -> list[RequestState]:
        """All requests."""
        return [*self.running, *self.waiting]

    def add(self, request: GenerationRequest) -> RequestState:
        """Puts a request into the queue. Raises RequestError if it can never fit."""
        self.limits.check_fits(len(request.prompt_token_ids))
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._num_added += 1
        arrival_s = request.arrival_s + request.priority * self._policy.priority_step_s
        state = RequestState(request, (arrival_s, self._num_added))
        self._states[state.request_id] = state
        insort(self.waiting, state, key=_turn)
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
        entries, preempted, served = self._schedule_running(budget)
        budget -= sum(entry.num_tokens for entry in entries)
        first: list[ScheduledEntry] = []
        if admit and served:  # what is free is for the requests that need it
            first = self._admit(budget)
            entries += first
        if not entries:
            return None
        step, freed = self._next_step()
        return ScheduledStep(
            step,
            freed,
            opened=tuple(opening(entry) for entry in first),
            entries=tuple(entries),
            preempted=tuple(preempted),
            admitted=tuple(entry.state for entry in first),
        )

    def schedule_only(self, states: Sequence[RequestState]) -> ScheduledStep | None:
        """A cautious step of some running requests, or None if none of them has room.

        Call while no step is in flight.
        """
        budget = self.limits.max_step_tokens
        entries: list[ScheduledEntry] = []
        preempted: list[RequestState] = []
        for state in sorted(states, key=_turn):  # who is preempted has the last turn
            if state.slot is not None and budget > 0:
                num_tokens = self._chunk(state, budget, 0)
                entry = self._compute(state, num_tokens, budget, preempted)
                if entry is not None:
                    entries.append(entry)
                    budget -= entry.num_tokens
        if not entries:
            return None
        step, freed = self._next_step()
        return ScheduledStep(
            step,
            freed,
            opened=(),
            entries=tuple(entries),
            preempted=tuple(preempted),
            cautious=True,
        )

    def _next_step(self) -> tuple[int, tuple[int, ...]]:
        """Number of the next step, and slots that it frees."""
        self._step += 1
        freed, self._freed_slots = tuple(self._freed_slots), []
        return self._step, freed

    def commit(
        self,
        step: ScheduledStep,
        sampled: Mapping[int, Sequence[int]],
        drafts: Mapping[int, int] | None = None,
    ) -> list[RequestState]:
        """Appends the sampled tokens of a step.

        Args:
            step: A step that was computed.
            sampled: Request slot to token ids: one, and one more for each accepted draft.
            drafts: Request slot to the number of tokens proposed for the next step.

        Returns:
            Requests of which no token came although one was due; to be ended by the caller.
        """
        silent: list[RequestState] = []
        for entry in step.entries:
            if not entry.current:
                continue
            tokens = sampled.get(entry.slot, ()) if entry.sample else ()
            state, num_committed = entry.state, commit_entry(entry, tokens)
            state.num_committed = num_committed
            state.num_drafts = drafts.get(entry.slot, 0) if drafts else 0
            if entry.sample and not tokens:
                silent.append(state)
            self._prefixes.keep(state, num_committed, self.blocks)
            self.blocks.free_unseen(state.request_id, num_committed)
        return silent

    def rewind(self, step: ScheduledStep) -> None:
        """Forgets that a step was scheduled, so that the same work is scheduled again.

        Slots and blocks stay as they are: the attention worker keeps them from an abandoned step.
        Of several steps in flight the last one is rewound first.
        """
        for entry in step.entries:
            if entry.current:
                entry.state.num_computed = entry.start
                entry.state.num_placeholders -= entry.sample

    def distrust(self, state: RequestState) -> None:
        """Lets nobody find what a running request computed or found: it may be damaged."""
        self._prefixes.forget(state, self.blocks)

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

    def requeue(self) -> None:
        """Lets all running requests wait: what their attention worker knew is lost."""
        for state in list(self.running):
            self._preempt(state)

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
        held = [self.blocks.held_by(state.request_id) for state in self.running]
        assert len(set().union(*held)) == self.blocks.num_used
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_turn)

    def _schedule_running(
        self, budget: int
    ) -> tuple[list[ScheduledEntry], list[RequestState], bool]:
        """Work of the running requests, those that were preempted for it, and whether there were
        blocks for all."""
        entries: list[ScheduledEntry] = []
        preempted: list[RequestState] = []
        index = 0
        while index < len(self.running) and budget > 0:
            state = self.running[index]
            num_later = len(self.running) - index - 1
            num_tokens = self._chunk(state, budget, num_later)
            if num_tokens > 0:
                entry = self._compute(state, num_tokens, budget - num_later, preempted)
                if entry is None:
                    return entries, preempted, False
                entries.append(entry)
                budget -= entry.num_tokens
            index += 1
        return entries, preempted, not preempted

    def _chunk(self, state: RequestState, budget: int, num_later: int) -> int:
        """How many known tokens of a request this step computes.

        Args:
            state: The request.
            budget: Tokens left in the step.
            num_later: Running requests behind it; each is left a token.
        """
        wanted = state.num_wanted(self.limits.max_model_len)
        if wanted > 1 and len(self._states) > 1:
            wanted = min(wanted, self._policy.long_prefill(self.limits.max_step_tokens))
        return min(wanted, max(1, budget - num_later))

    def _compute(
        self, state: RequestState, num_tokens: int, budget: int, preempted: list[RequestState]
    ) -> ScheduledEntry | None:
        """Work of a running request, with its drafts if there is room; None if there is none for
        it, and its turn is the last one."""
        num_drafts = min(
            state.num_drafts, budget - num_tokens, state.room(self.limits.max_model_len) - 1
        )
        if num_drafts > 0 and not state.num_placeholders:
            end = state.num_computed + num_tokens + num_drafts
            blocks = self.blocks.grow(state.request_id, end)
            if blocks is not None:
                return advance(state, num_tokens, blocks, num_drafts)
        blocks = self._grow_or_preempt(state, state.num_computed + num_tokens, preempted)
        return None if blocks is None else advance(state, num_tokens, blocks)

    def _grow_or_preempt(
        self, state: RequestState, num_tokens: int, preempted: list[RequestState]
    ) -> tuple[BlockAppend, ...] | None:
        """Blocks for a running request; None if it must wait for the steps in flight, which may
        free some of its own, or was preempted itself."""
        while True:
            blocks = self.blocks.grow(state.request_id, num_tokens)
            if blocks is not None:
                return blocks
            victim = self.running[-1]
            if victim is state and state.in_flight:
                return None
            self._preempt(victim)
            preempted.append(victim)
            if victim is state:
                return None

    def _admit(self, budget: int) -> list[ScheduledEntry]:
        """First work of waiting requests, as many as have room."""
        entries: list[ScheduledEntry] = []
        while self.waiting and self._free_slots and budget > 0:
            entry = self._open(self.waiting[0], budget)
            if entry is None:
                break
            entries.append(entry)
            budget -= entry.num_tokens
        return entries

    def _open(self, state: RequestState, budget: int) -> ScheduledEntry | None:
        """First work of the request that waits first; None if not all of it fits."""
        found = self._prefixes.find(state, self.blocks)
        num_known = len(state.token_ids)
        state.num_computed = found.num_blocks * self.blocks.block_size
        num_tokens = self._chunk(state, budget, 0)
        end = state.num_computed + num_tokens
        headroom = self._headroom()
        blocks = self.blocks.open(state.request_id, found, num_known, end, headroom=headroom)
        if blocks is None:
            state.num_computed = 0
            return None
        state.num_committed = state.num_computed
        state.num_kept_blocks = found.num_blocks
        if state.life == 0:
            state.num_cached_tokens = state.num_computed
            self.num_prefix_queried += num_known
            self.num_prefix_hit += state.num_computed
        self.waiting.pop(0)
        insort(self.running, state, key=_turn)
        state.slot = self._free_slots.pop()
        state.life += 1
        return advance(state, num_tokens, blocks)

    def _headroom(self) -> int:
        """Blocks that are left to the running requests when one is admitted.

        One in each KV group, and what their prompts still need: what would be preempted again
        within a few steps is better not admitted.
        """
        return self.blocks.groups.num_groups * len(self.running) + sum(
            self.blocks.num_lacking(state.request_id, len(state.token_ids))
            for state in self.running
            if state.num_computed < len(state.token_ids)
        )

    def _preempt(self, state: RequestState) -> None:
        self._release(state)
        insort(self.waiting, state, key=_turn)

    def _release(self, state: RequestState) -> None:
        assert state.slot is not None
        self.running.remove(state)
        self.blocks.free(state.request_id)
        self._free_slots.append(state.slot)
        self._freed_slots.append(state.slot)
        state.slot = None
        state.num_computed = 0
        state.num_committed = 0
        state.num_placeholders = 0
        state.num_drafts = 0
        state.num_kept_blocks = 0
