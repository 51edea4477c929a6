"""Scheduling decisions, and what must hold for any load: see the properties at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.errors import ContextLengthError, RequestError
from gateway.engine.block_manager import BlockAppend
from gateway.engine.request_state import RequestState
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.engine.step_messages import step_message
from gateway.sequence import GenerationRequest, SamplingParams
from tests.support.kv_checks import check_seen_tokens
from tests.support.strict_attention import StrictAttention, continuation

LIMITS = SchedulerLimits(
    num_kv_blocks=8, kv_block_size=4, num_request_slots=4, max_step_tokens=8, model_len=32
)


def request(name: str, prompt: Sequence[int], max_tokens: int = 4) -> GenerationRequest:
    """A greedy request whose outputs nobody reads."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return GenerationRequest(name, tuple(prompt), params, lambda output: None, arrival_s=0.0)


class Simulation:
    """A scheduler with a strict attention worker behind it; ends requests at max_tokens."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.scheduler = Scheduler(limits)
        self.worker = StrictAttention(limits)
        self.ended: dict[str, tuple[int, ...]] = {}
        self.num_preemptions = 0
        self.recomputed_tokens = 0

    def turn(self, *, paused: bool = False) -> int:
        """One step; returns the number of tokens computed."""
        before = {s.request_id: s.num_computed for s in self.scheduler.running}
        step = self.scheduler.schedule()
        if step is None:
            return 0
        for state in step.preempted:
            self.num_preemptions += 1
            self.recomputed_tokens += before[state.request_id]
        message = step_message(step, 0)
        if paused:
            self.worker.apply_deltas(message)
            self.scheduler.rewind(step)
        else:
            response = self.worker.execute(message)
            tokens = {token.slot: [token.token_id] for token in response.sampled}
            assert self.scheduler.commit(step, tokens) == []
            for state in list(self.scheduler.running):
                self._end_if_due(state)
        self.scheduler.check_integrity()
        check_seen_tokens(self.scheduler)
        return step.num_tokens

    def _end_if_due(self, state: RequestState) -> None:
        full = len(state.token_ids) >= self.scheduler.limits.max_model_len
        if full or state.num_generated >= state.request.params.max_tokens:
            self.ended[state.request_id] = tuple(state.token_ids[state.num_prompt_tokens :])
            self.scheduler.finish(state.request_id)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """A prompt of 20 tokens takes three steps of 8; only the last one samples."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("a", range(20)))
    chunks = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        chunks += [(e.start, e.num_tokens, e.sample) for e in step.entries]
        scheduler.commit(step, {e.slot: [5] for e in step.entries if e.sample})
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_running_requests_come_before_waiting_ones() -> None:
    """What is left of the budget after the running requests goes to the first in the queue."""
    simulation = Simulation()
    simulation.scheduler.add(request("a", range(6)))
    simulation.turn()
    simulation.scheduler.add(request("b", range(10)))
    step = simulation.scheduler.schedule()
    assert step is not None
    assert [(e.state.request_id, e.num_tokens) for e in step.entries] == [("a", 1), ("b", 4)]


def test_deltas_are_sent_once() -> None:
    """A request is opened once, and only new blocks are named."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("a", range(4)))
    first = scheduler.schedule()
    assert first is not None
    scheduler.commit(first, {0: [5]})
    second = scheduler.schedule()
    assert second is not None
    assert [opening.slot for opening in first.opened] == [0]
    assert first.entries[0].new_blocks == (BlockAppend(0, 0, (0,)),)
    assert second.opened == ()
    assert second.entries[0].new_blocks == (BlockAppend(0, 1, (1,)),)


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """Admission needs blocks for the whole prompt, and nobody overtakes the first in the queue."""
    simulation = Simulation()
    simulation.scheduler.add(request("a", range(16), max_tokens=2))
    simulation.scheduler.add(request("b", range(50, 70)))
    simulation.scheduler.add(request("c", range(2)))
    while not simulation.ended:
        simulation.turn()
    assert simulation.ended.keys() == {"a"}
    assert [state.request_id for state in simulation.scheduler.waiting] == ["b", "c"]
    simulation.turn()
    assert next(state.request_id for state in simulation.scheduler.running) == "b"


def test_the_youngest_is_preempted_and_computed_again() -> None:
    """Without blocks the youngest gives way, waits at the head, and gets the same tokens."""
    simulation = Simulation(
        SchedulerLimits(
            num_kv_blocks=5, kv_block_size=4, num_request_slots=4, max_step_tokens=16, model_len=16
        )
    )
    simulation.scheduler.add(request("old", range(7), max_tokens=8))
    simulation.scheduler.add(request("young", range(3, 10), max_tokens=8))
    simulation.scheduler.add(request("late", [1], max_tokens=1))
    while simulation.num_preemptions == 0:
        simulation.turn()
    assert [state.request_id for state in simulation.scheduler.waiting] == ["young", "late"]
    while simulation.scheduler.has_work:
        simulation.turn()
    assert simulation.ended["old"] == continuation(range(7), 8)
    assert simulation.ended["young"] == continuation(range(3, 10), 8)


def test_recomputation_says_which_tokens_are_the_prompt() -> None:
    """A request that comes back sends prompt and generated tokens, and where the prompt ends."""
    limits = SchedulerLimits(3, 4, 2, 16, 8)
    scheduler = Scheduler(limits)
    scheduler.add(request("a", [1, 2, 3], max_tokens=5))
    scheduler.add(request("b", [4, 5, 6], max_tokens=5))
    openings = []
    for _ in range(7):
        step = scheduler.schedule()
        assert step is not None
        openings += list(step.opened)
        scheduler.commit(step, {e.slot: [9] for e in step.entries if e.sample})
        for state in list(scheduler.running):
            if state.num_generated == 5:
                scheduler.finish(state.request_id)
    assert openings[-1].token_ids == (4, 5, 6, 9, 9)
    assert openings[-1].num_prompt_tokens == 3


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_a_prompt_that_can_never_fit_is_refused(length: int) -> None:
    """A prompt that leaves no room for a token is refused with both numbers."""
    with pytest.raises(ContextLengthError, match=f"{length} tokens.* 32"):
        Scheduler(LIMITS).add(request("a", range(length)))


def test_the_kv_cache_bounds_the_length_too() -> None:
    """A cache smaller than the model's context is what counts."""
    limits = SchedulerLimits(2, 4, 2, 8, model_len=32)
    with pytest.raises(ContextLengthError, match="can have 8"):
        Scheduler(limits).add(request("a", range(8)))


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    """There is nothing to compute for an empty prompt; an id names one request."""
    scheduler = Scheduler(LIMITS)
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request("a", []))
    scheduler.add(request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(request("a", [2]))


def test_finishing_frees_at_once_and_tells_with_the_next_step() -> None:
    """Blocks and slot of an ended request are free; its slot is named in the next step."""
    simulation = Simulation()
    simulation.scheduler.add(request("a", range(5)))
    simulation.turn()
    simulation.scheduler.finish("a")
    assert simulation.scheduler.blocks.num_used == 0
    assert simulation.scheduler.num_free_slots == 4
    simulation.scheduler.add(request("b", range(3)))
    step = simulation.scheduler.schedule()
    assert step is not None
    assert step.freed_slots == (0,)
    assert step.opened[0].slot == 0


def test_a_missing_token_is_reported() -> None:
    """A request of which a token was due and none came is handed to the caller."""
    scheduler = Scheduler(LIMITS)
    state = scheduler.add(request("a", range(3)))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.commit(step, {}) == [state]


def test_the_next_step_can_be_planned_while_one_is_in_flight() -> None:
    """With placeholders the plan goes on; results of an ended request are dropped."""
    scheduler = Scheduler(LIMITS)
    state = scheduler.add(request("a", range(4), max_tokens=2))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [(e.start, e.num_tokens, e.sample) for e in second.entries] == [(4, 1, True)]
    assert scheduler.schedule() is None  # the last possible token is in flight
    scheduler.commit(first, {0: [7]})
    assert state.token_ids == [0, 1, 2, 3, 7]
    scheduler.finish("a")
    assert scheduler.commit(second, {0: [8]}) == []
    assert state.token_ids == [0, 1, 2, 3, 7]


def test_reset_keeps_waiting_requests() -> None:
    """After the loss of an attention worker the queue is kept, except what fits no more."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("short", range(3)))
    scheduler.add(request("long", range(30)))
    lost = scheduler.reset(SchedulerLimits(4, 4, 2, 8, 32))
    assert [state.request_id for state in lost] == ["long"]
    assert [state.request_id for state in scheduler.waiting] == ["short"]
    scheduler.check_integrity()


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12)
pools = st.builds(
    lambda blocks, slots, step_tokens, model_len, windows: SchedulerLimits(
        blocks * len(windows), 4, slots, step_tokens, model_len, windows
    ),
    blocks=st.integers(6, 14),
    slots=st.integers(1, 5),
    step_tokens=st.integers(1, 24),
    model_len=st.integers(24, 40),
    windows=st.sampled_from([(None,), (None,), (1,), (6,), (None, 5), (None, 14, 3)]),
)


@given(load=requests, limits=pools, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_with_its_own_tokens(
    load: list[tuple[int, int]], limits: SchedulerLimits, seed: int
) -> None:
    """For any load, pool and pauses: all end, with the tokens of their prompt alone; the budget
    holds, and each token is computed once between preemptions."""
    simulation, chance = Simulation(limits), random.Random(seed)
    pending = [
        request(f"r{index}", range(index, index + length), max_tokens)
        for index, (length, max_tokens) in enumerate(load)
    ]
    turns = 0
    while pending or simulation.scheduler.has_work:
        if pending and chance.random() < 0.5:
            simulation.scheduler.add(pending.pop(0))
        simulation.turn(paused=chance.random() < 0.1)
        turns += 1
        assert turns < 5000, "a request starves"
    for index, (length, max_tokens) in enumerate(load):
        expected_len = min(max_tokens, limits.max_model_len - length)
        expected = continuation(range(index, index + length), expected_len)
        assert simulation.ended[f"r{index}"] == expected
    assert simulation.scheduler.blocks.num_used == 0
    assert simulation.scheduler.num_free_slots == limits.num_request_slots
    distinct = sum(
        length + len(simulation.ended[f"r{i}"]) - 1 for i, (length, _) in enumerate(load)
    )
    worker = simulation.worker
    computed = worker.num_computed_tokens + worker.num_cached_tokens
    assert computed == distinct + simulation.recomputed_tokens


@given(load=requests, limits=pools, seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_requests_may_be_ended_at_any_time(
    load: list[tuple[int, int]], limits: SchedulerLimits, seed: int
) -> None:
    """Ending any request at any time leaks nothing and leaves the others alone."""
    simulation, chance = Simulation(limits), random.Random(seed)
    for index, (length, max_tokens) in enumerate(load):
        simulation.scheduler.add(request(f"r{index}", range(length), max_tokens))
    names = [f"r{index}" for index in range(len(load))]
    while simulation.scheduler.has_work:
        if chance.random() < 0.25:
            simulation.scheduler.finish(chance.choice(names))
            simulation.scheduler.check_integrity()
        simulation.turn()
    for index, (length, max_tokens) in enumerate(load):
        if f"r{index}" in simulation.ended:
            expected_len = min(max_tokens, limits.max_model_len - length)
            assert simulation.ended[f"r{index}"] == continuation(range(length), expected_len)
    assert simulation.scheduler.blocks.num_used == 0
