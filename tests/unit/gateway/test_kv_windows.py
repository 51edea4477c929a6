"""Scheduling of models with sliding windows: what is behind a window is free for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.kv_groups import KvGroups
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.block_manager import NO_BLOCK
from gateway.engine.request_state import ScheduledStep
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.engine.step_messages import limits_of, step_message
from gateway.sequence import GenerationRequest, SamplingParams
from tests.support.kv_checks import check_seen_tokens
from tests.support.strict_attention import StrictAttention, continuation

SIZE, WINDOW, STEP = 4, 6, 8


def limits(
    num_blocks: int, *windows: int | None, slots: int = 4, model_len: int = 100
) -> SchedulerLimits:
    """Steps of 8 tokens, blocks of 4."""
    return SchedulerLimits(num_blocks, SIZE, slots, STEP, model_len, windows)


def request(name: str, prompt: Sequence[int], max_tokens: int = 4) -> GenerationRequest:
    """A greedy request whose outputs nobody reads."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return GenerationRequest(name, tuple(prompt), params, lambda output: None, arrival_s=0.0)


class Pipelined:
    """A scheduler whose attention worker has two steps at a time."""

    def __init__(self, of: SchedulerLimits) -> None:
        self.scheduler = Scheduler(of)
        self.worker = StrictAttention(of)
        self.ended: dict[str, tuple[int, ...]] = {}
        self.num_preemptions = 0
        self._in_flight: deque[tuple[ScheduledStep, pb.StepRequest]] = deque()

    def turn(self) -> bool:
        """Sends what there is to send, and takes a result; False if nothing is left."""
        while len(self._in_flight) < 2 and (step := self.scheduler.schedule()):
            self.num_preemptions += len(step.preempted)
            self._in_flight.append((step, step_message(step, 0)))
        if not self._in_flight:
            assert not self.scheduler.has_work, "nothing to compute, though requests are left"
            return False
        step, message = self._in_flight.popleft()
        response = self.worker.execute(message)
        self.scheduler.commit(step, {token.slot: [token.token_id] for token in response.sampled})
        for state in list(self.scheduler.running):
            if state.num_generated >= state.request.params.max_tokens:
                self.ended[state.request_id] = tuple(state.token_ids[state.num_prompt_tokens :])
                self.scheduler.finish(state.request_id)
        self.scheduler.check_integrity()
        check_seen_tokens(self.scheduler)
        return True


@given(
    windows=st.lists(st.sampled_from([None, 1, 2, 3, 6, 9, 17]), min_size=1, max_size=3),
    block_size=st.integers(1, 5),
    step_tokens=st.integers(1, 20),
    num_prompt=st.integers(1, 45),
    num_tokens=st.integers(1, 15),
)
@settings(max_examples=150, deadline=None)
def test_a_request_that_fits_alone_ends_with_two_steps_in_flight(
    windows: list[int | None],
    block_size: int,
    step_tokens: int,
    num_prompt: int,
    num_tokens: int,
) -> None:
    """In the pool that the attention worker takes for enough, the longest request: it waits for a
    result where two steps need more than one, and is never preempted: that would never end."""
    model_len = num_prompt + num_tokens
    groups = KvGroups.of(block_size, windows)
    num_blocks = groups.sequence_blocks(model_len, step_tokens)
    pool = SchedulerLimits(num_blocks, block_size, 2, step_tokens, model_len, tuple(windows))
    assert pool.max_model_len == model_len
    prompt = tuple(range(num_prompt))
    served = Pipelined(pool)
    served.scheduler.add(request("a", prompt, num_tokens))
    for _ in range(model_len + 3):
        if not served.turn():
            break
    assert served.ended == {"a": continuation(prompt, num_tokens)}
    assert served.num_preemptions == 0


def test_nobody_is_admitted_while_a_running_request_waits_for_blocks() -> None:
    """What is free is for it, not for one that came later, though that would need less."""
    scheduler = Scheduler(SchedulerLimits(15, SIZE, 4, 32, 100, (WINDOW,)))
    scheduler.add(request("long", range(90)))
    first = scheduler.schedule()
    assert first is not None
    scheduler.add(request("short", [1]))
    second = scheduler.schedule(admit=False)  # with a neighbour, chunks are half as large
    assert second is not None
    assert [step.num_tokens for step in (first, second)] == [32, 16]
    assert scheduler.blocks.num_free == 3, "the next chunk needs four"
    assert scheduler.schedule() is None
    scheduler.commit(first, {})
    third = scheduler.schedule()
    assert third is not None
    assert [entry.state.request_id for entry in third.entries] == ["long", "short"]


def test_long_prompts_share_a_pool_that_holds_little_of_each() -> None:
    """Four prompts of 80 tokens, 20 blocks each if all were kept, in a pool of 24."""
    prompts = [tuple(range(index, index + 80)) for index in range(4)]
    served = Pipelined(limits(24, WINDOW, model_len=100))
    for index, prompt in enumerate(prompts):
        served.scheduler.add(request(f"r{index}", prompt, 12))
    most_running = 0
    while served.turn():
        most_running = max(most_running, len(served.scheduler.running))
    assert served.ended == {f"r{i}": continuation(p, 12) for i, p in enumerate(prompts)}
    assert most_running >= 3
    assert served.num_preemptions == 0


def test_a_prefix_is_found_without_what_is_behind_its_window() -> None:
    """The second request is told only the blocks that its first token sees."""
    scheduler = Scheduler(limits(60, None, WINDOW))
    prompt = tuple(range(30))
    scheduler.add(request("a", prompt))
    while scheduler.states and not scheduler.states[0].num_generated:
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(step, {entry.slot: [7] for entry in step.entries if entry.sample})
    assert scheduler.blocks.table("a", 1)[:6] == (NO_BLOCK,) * 6
    scheduler.finish("a")
    again = scheduler.add(request("b", prompt))
    step = scheduler.schedule()
    assert step is not None
    assert again.num_cached_tokens == 28
    whole, windowed = step.entries[0].new_blocks
    assert (whole.group, whole.start, len(whole.block_ids)) == (0, 0, 8)
    assert (windowed.group, windowed.start, len(windowed.block_ids)) == (1, 5, 3)


def test_nobody_finds_what_a_distrusted_request_left_behind_its_window() -> None:
    """Blocks that it computed and gave back already may be damaged as well."""
    scheduler = Scheduler(limits(60, None, WINDOW))
    prompt = tuple(range(30))
    state = scheduler.add(request("a", prompt))
    while not state.num_generated:
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(step, {entry.slot: [7] for entry in step.entries if entry.sample})
    assert scheduler.blocks.num_kept > len(scheduler.blocks.held_by("a")) - 2
    scheduler.distrust(state)
    assert scheduler.blocks.num_kept == 0
    scheduler.finish("a")
    scheduler.check_integrity()
    again = scheduler.add(request("b", prompt))
    scheduler.schedule()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("num_blocks", "windows", "expected"),
    [
        (10, (None,), 40),
        (10, (None, None), 20),
        (10, (WINDOW,), 100),
        (3, (WINDOW,), 12),
        (4, (WINDOW,), 100),
        (14, (None, WINDOW), 40),
        (13, (None, WINDOW), 36),
    ],
    ids=str,
)
def test_the_longest_sequence_is_the_one_that_fits_alone(
    num_blocks: int, windows: tuple[int | None, ...], expected: int
) -> None:
    """A window of 6 and a step of 8 are 13 tokens, which lie in up to 4 blocks: no sequence needs
    more of them, a shorter one less."""
    found = limits(num_blocks, *windows)
    assert found.max_model_len == expected
    assert found.kv_cache_tokens == num_blocks // len(windows) * SIZE


def test_the_attention_worker_tells_the_windows() -> None:
    """A window of 0 is none."""
    described = pb.DescribeResponse(
        num_kv_blocks=10,
        kv_block_size=4,
        max_step_tokens=8,
        max_model_len=100,
        num_request_slots=2,
        kv_groups=[pb.KvGroup(), pb.KvGroup(sliding_window=6)],
    )
    assert limits_of(described).sliding_windows == (None, 6)


@pytest.mark.parametrize("windows", [(), (0,), (None, -3)])
def test_impossible_windows_are_refused(windows: tuple[int | None, ...]) -> None:
    """There is a group, and a token sees itself."""
    limits = SchedulerLimits(4, 4, 2, 8, 32, windows)
    with pytest.raises(ValueError, match="expected one or more of at least 1"):
        limits.check_fits(1)
