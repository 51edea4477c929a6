"""The scheduler under any order of events, with steps in flight, against a strict attention worker.

The attention worker checks every delta and that keys and values are those of the same prefix. Here
it is checked that budgets and turns hold, that prefixes stay with their salt, and that in the end
each request has the tokens that follow its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.request_state import RequestState, ScheduledStep
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits, SchedulerPolicy
from gateway.engine.step_messages import step_message
from gateway.sequence import GenerationRequest, SamplingParams
from tests.support.kv_checks import check_seen_tokens
from tests.support.strict_attention import StrictAttention, continuation

_STEMS = (tuple(range(5, 29)), tuple(range(40, 64)), (5, 6, 7, 8, 9, 10, 11, 12, *range(70, 86)))
"""Prompts begin as one of these; the last one shares eight tokens with the first."""
_MOST_STEPS_TO_END = 4000

limits_of_pools = st.builds(
    lambda blocks, slots, spare, windows: SchedulerLimits(
        num_kv_blocks=blocks * len(windows),
        kv_block_size=4,
        num_request_slots=slots,
        max_step_tokens=slots + spare,
        model_len=40,
        sliding_windows=windows,
    ),
    blocks=st.integers(6, 16),
    windows=st.sampled_from(
        [(None,), (None,), (7,), (None, 1), (None, 9), (12, 5), (None, 13, 6), (None, None, 2)]
    ),
    slots=st.integers(1, 6),
    spare=st.integers(0, 16),
)
"""Every request that runs has room in each step."""
policies = st.builds(
    SchedulerPolicy,
    prefix_caching=st.sampled_from([True, True, False]),
    long_prefill_tokens=st.sampled_from([None, 3, 16]),
    priority_step_s=st.just(10.0),
)


@dataclass
class _Flight:
    step: ScheduledStep
    message: pb.StepRequest


class SchedulerMachine(RuleBasedStateMachine):
    """What the engine does with a scheduler, in any order that may come up."""

    @initialize(limits=limits_of_pools, policy=policies, depth=st.integers(1, 3))
    def start(self, limits: SchedulerLimits, policy: SchedulerPolicy, depth: int) -> None:
        self.scheduler = Scheduler(limits, policy)
        self.depth = depth
        self.drafts = depth == 1
        self.flights: deque[_Flight] = deque()
        self.now_s = 0.0
        self.num_added = 0
        self.expected: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, tuple[int, ...]] = {}
        self.computed: set[tuple[str, tuple[int, ...]]] = set()
        """(salt, tokens) of prefixes that a committed step computed, in this life."""
        self._new_worker(limits)

    @rule(
        stem=st.sampled_from(_STEMS),
        num_stem=st.integers(1, 20),
        tail=st.lists(st.integers(3, 90), max_size=4),
        max_tokens=st.integers(1, 14),
        priority=st.sampled_from([0, 0, 0, -3, 2]),
        salt=st.sampled_from(["", "", "", "theirs"]),
        wants_all=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        stem: tuple[int, ...],
        num_stem: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        wants_all: bool,
    ) -> None:
        prompt = (*stem[:num_stem], *tail)
        limits = self.scheduler.limits
        if len(prompt) >= limits.max_model_len:
            return
        self.now_s += 1.0
        self.num_added += 1
        name = f"r{self.num_added}"
        params = SamplingParams(
            max_tokens, temperature=0, num_prompt_logprobs=0 if wants_all else None
        )
        self.scheduler.add(
            GenerationRequest(
                name,
                prompt,
                params,
                lambda output: None,
                self.now_s,
                priority=priority,
                cache_salt=salt,
            )
        )
        num_tokens = min(max_tokens, limits.max_model_len - len(prompt))
        self.expected[name] = continuation(prompt, num_tokens)

    @precondition(lambda self: len(self.flights) < self.depth)
    @rule(admit=st.sampled_from([True, True, True, False]))
    def send(self, admit: bool) -> None:
        self._send(admit=admit)

    @precondition(lambda self: self.flights)
    @rule()
    def deliver(self) -> None:
        self._deliver()

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """The logits of a request are not finite; others in the step get their tokens."""
        slots = [entry.slot for entry in self.flights[0].step.entries]
        self._deliver({data.draw(st.sampled_from(slots))})

    @rule(num_turns=st.integers(1, 8))
    def turns(self, num_turns: int) -> None:
        """As when nothing happens."""
        for _ in range(num_turns):
            self._fill()
            if self.flights:
                self._deliver()

    @rule(fails=st.sampled_from([False, False, True]))
    def abandon(self, fails: bool) -> None:
        """Experts are missing, or the step fails; those behind it are skipped."""
        self._fill()
        if not self.flights:
            return
        oldest = self.flights.popleft()
        self.worker.apply_deltas(oldest.message)
        for flight in reversed(self.flights):
            self.scheduler.rewind(flight.step)
        for flight in self.flights:
            response = self.worker.execute(flight.message)
            assert response.status == pb.StepResponse.STATUS_SKIPPED
        self.flights.clear()
        if not fails:
            self.scheduler.rewind(oldest.step)
            return
        for entry in oldest.step.entries:
            if entry.current:
                self._forget(entry.state)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), distrusted=st.booleans())
    def cancel(self, data: st.DataObject, distrusted: bool) -> None:
        state = data.draw(st.sampled_from(self.scheduler.states))
        if distrusted and state.slot is not None:
            self.scheduler.distrust(state)
        self._forget(state)

    @precondition(lambda self: self.scheduler.running)
    @rule(num_blocks=st.integers(6, 16), really=st.sampled_from([False, False, True]))
    def lose(self, num_blocks: int, really: bool) -> None:
        """The attention worker is lost; the next one has more room or less."""
        if not really:
            return
        self.flights.clear()
        self.scheduler.requeue()
        old = self.scheduler.limits
        num_groups = len(old.sliding_windows)
        limits = replace(old, num_kv_blocks=num_blocks * num_groups)
        for state in self.scheduler.reset(limits):
            del self.expected[state.request_id]
        for state in list(self.scheduler.waiting):
            left = limits.max_model_len - state.num_prompt_tokens
            most = min(left, state.request.params.max_tokens)
            prompt = state.request.prompt_token_ids
            self.expected[state.request_id] = continuation(prompt, most)
        self.computed.clear()
        self._new_worker(limits)

    @invariant()
    def is_whole(self) -> None:
        """Blocks, slots and queues agree with each other, and outputs with their prompts."""
        self.scheduler.check_integrity()
        check_seen_tokens(self.scheduler)
        for state in self.scheduler.states:
            known = tuple(state.token_ids[state.num_prompt_tokens :])
            assert known == self.expected[state.request_id][: len(known)]

    def teardown(self) -> None:
        """All that are left end within a bounded number of steps, and nothing is held then."""
        if not hasattr(self, "scheduler"):
            return
        num_steps = 0
        while self.scheduler.has_work or self.flights:
            self._fill()
            assert self.flights, "nothing to compute, though requests are left"
            self._deliver()
            num_steps += 1
            assert num_steps < _MOST_STEPS_TO_END, "a request starves"
        assert self.ended == self.expected
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.num_free_slots == self.scheduler.limits.num_request_slots

    def _new_worker(self, limits: SchedulerLimits) -> None:
        self.worker = StrictAttention(limits)
        if self.drafts:
            self.worker.num_drafts_of = lambda token_ids: sum(token_ids) % 5
            self.worker.drafts_hold = lambda token_ids: sum(token_ids) % 3

    def _fill(self) -> None:
        while len(self.flights) < self.depth and self._send():
            pass

    def _send(self, *, admit: bool = True) -> bool:
        due = [
            state
            for state in self.scheduler.running
            if state.num_wanted(self.scheduler.limits.max_model_len)
        ]
        step = self.scheduler.schedule(admit=admit)
        if step is None:
            return False
        self._check_step(step, due, admit)
        after = self.flights[-1].step.step if self.flights else 0
        self.flights.append(_Flight(step, step_message(step, 0, after_step=after)))
        return True

    def _check_step(self, step: ScheduledStep, due: Sequence[RequestState], admit: bool) -> None:
        """The budget holds, every running request advances, and turns are kept."""
        limits = self.scheduler.limits
        assert 1 <= step.num_tokens <= limits.max_step_tokens
        scheduled = [entry.state for entry in step.entries]
        held_up = [s for s in due if s not in scheduled and s not in step.preempted]
        assert held_up == [s for s in held_up if s.in_flight][:1], "only the last one waits"
        assert not held_up or self.scheduler.running[-1] is held_up[0]
        assert not step.admitted or (admit and not step.preempted and not held_up)
        for state in (*step.admitted, *self.scheduler.running):
            if state in step.preempted or state in step.admitted:
                continue
            assert all(state.turn < preempted.turn for preempted in step.preempted)
        for state in step.admitted:
            assert all(state.turn < waiting.turn for waiting in self.scheduler.waiting)
        for opening, state in zip(step.opened, step.admitted, strict=True):
            found = (state.request.cache_salt, opening.token_ids[: opening.num_cached])
            assert not opening.num_cached or found in self.computed
            if state.request.params.num_prompt_logprobs is not None:
                assert opening.num_cached == 0

    def _deliver(self, spoiled: Collection[int] = ()) -> None:
        flight = self.flights.popleft()
        response = self.worker.execute(flight.message, spoiled=spoiled)
        assert response.status == pb.StepResponse.STATUS_DONE
        tokens: dict[int, list[int]] = {}
        for token in response.sampled:
            tokens.setdefault(token.slot, []).append(token.token_id)
        drafts = {draft.slot: draft.num_drafts for draft in response.drafts}
        for state in self.scheduler.commit(flight.step, tokens, drafts):
            assert state.slot in response.nonfinite_slots
            self.scheduler.distrust(state)
            self._forget(state)
        for entry in flight.step.entries:
            if entry.current:
                self._note_computed(entry.state, entry.start + entry.num_tokens)
                self._end_if_due(entry.state)

    def _note_computed(self, state: RequestState, num_tokens: int) -> None:
        size = self.scheduler.limits.kv_block_size
        for end in range(size, min(num_tokens, len(state.token_ids)) + 1, size):
            self.computed.add((state.request.cache_salt, tuple(state.token_ids[:end])))

    def _end_if_due(self, state: RequestState) -> None:
        full = len(state.token_ids) >= self.scheduler.limits.max_model_len
        if full or state.num_generated >= state.request.params.max_tokens:
            self.ended[state.request_id] = tuple(state.token_ids[state.num_prompt_tokens :])
            self.scheduler.finish(state.request_id)

    def _forget(self, state: RequestState) -> None:
        del self.expected[state.request_id]
        self.scheduler.finish(state.request_id)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
