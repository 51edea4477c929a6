"""Who goes first, who waits how long, and when a request has waited too long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from expertmesh.errors import DeadlineError
from expertmesh.settings import EngineSettings
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits, SchedulerPolicy
from gateway.sequence import FinishReason, GenerationRequest, SamplingParams
from tests.support.engine_bench import IDLE, Answer, Bench, running, wait_for
from tests.support.strict_attention import continuation

LIMITS = SchedulerLimits(
    num_kv_blocks=256, kv_block_size=4, num_request_slots=4, max_step_tokens=16, model_len=200
)


def request(
    name: str,
    num_prompt: int = 3,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    params: SamplingParams | None = None,
) -> GenerationRequest:
    """A request whose outputs nobody reads."""
    return GenerationRequest(
        name,
        tuple(range(num_prompt)),
        params or SamplingParams(max_tokens=190, temperature=0),
        lambda output: None,
        arrival_s,
        priority=priority,
    )


def step(scheduler: Scheduler, num_tokens: int = 1) -> dict[str, int]:
    """One step; returns the number of tokens computed for each request.

    Args:
        scheduler: What schedules.
        num_tokens: Tokens that come of each request that is due one.
    """
    scheduled = scheduler.schedule()
    assert scheduled is not None
    sampled = {entry.slot: [7] * num_tokens for entry in scheduled.entries if entry.sample}
    scheduler.commit(scheduled, sampled)
    return {entry.state.request_id: entry.num_tokens for entry in scheduled.entries}


@pytest.mark.parametrize("long_prefill_tokens", [None, 1, 13, 100])
@pytest.mark.parametrize("arrival_s", [-1.0, 1.0], ids=["first", "last"])
def test_a_long_prompt_starves_nobody(long_prefill_tokens: int | None, arrival_s: float) -> None:
    """While it is computed in chunks, every running request gets a token in each step, whether its
    turn is the first or the last."""
    policy = SchedulerPolicy(long_prefill_tokens=long_prefill_tokens)
    scheduler = Scheduler(LIMITS, policy)
    for name in "abc":
        scheduler.add(request(name))
    step(scheduler)
    long = scheduler.add(request("long", 120, arrival_s=arrival_s))
    while long.num_generated == 0:
        computed = step(scheduler)
        assert {name: computed[name] for name in "abc"} == dict.fromkeys("abc", 1)
        assert computed["long"] >= 1


def test_two_long_prompts_share_the_steps() -> None:
    """The second one does not wait until the first is done."""
    scheduler = Scheduler(LIMITS)
    first, second = scheduler.add(request("a", 100)), scheduler.add(request("b", 100))
    step(scheduler)
    assert (first.num_computed, second.num_computed) == (8, 8)


def test_a_prompt_alone_has_the_whole_step() -> None:
    """Chunks are small only for the sake of others."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("a", 100))
    assert step(scheduler) == {"a": 16}


def order_of(requests: Sequence[GenerationRequest], priority_step_s: float) -> list[str]:
    """Names in the order of admission, one after the other."""
    limits = replace(LIMITS, num_request_slots=1)
    scheduler = Scheduler(limits, SchedulerPolicy(priority_step_s=priority_step_s))
    for asked in requests:
        scheduler.add(asked)
    order = []
    while scheduler.has_work:
        (name,) = step(scheduler)
        order.append(name)
        scheduler.finish(name)
    return order


def test_lower_priorities_go_first() -> None:
    """Of requests that wait at the same time; equals in the order of their arrival."""
    asked = [
        request(f"{priority} {i}", priority=priority) for i in (0, 1) for priority in (1, 0, -1)
    ]
    assert order_of(asked, 10.0) == ["-1 0", "-1 1", "0 0", "0 1", "1 0", "1 1"]


def test_nobody_is_overtaken_for_ever() -> None:
    """A level of priority is worth some seconds: who came earlier than that goes first."""
    asked = [
        request("patient", arrival_s=0.0, priority=2),
        request("soon", arrival_s=19.0),
        request("late", arrival_s=21.0),
        request("later, but urgent", arrival_s=29.0, priority=-1),
    ]
    assert order_of(asked, 10.0) == ["soon", "later, but urgent", "patient", "late"]
    assert order_of(asked, 0.0) == ["patient", "soon", "late", "later, but urgent"]


def test_accepted_drafts_can_be_found_by_others() -> None:
    """Blocks that are filled by drafts, some of them wrong, are named by what they hold."""
    scheduler = Scheduler(LIMITS)
    state = scheduler.add(request("a", 3, params=SamplingParams(max_tokens=30, temperature=0)))
    while state.num_generated < 20:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        (entry,) = scheduled.entries
        num_right = entry.num_drafts // 2
        tokens = list(range(100 + state.num_generated, 101 + state.num_generated + num_right))
        scheduler.commit(scheduled, {entry.slot: tokens}, {entry.slot: 5})
    sequence = tuple(state.token_ids)
    scheduler.finish("a")
    again = scheduler.add(replace(request("b"), prompt_token_ids=sequence))
    step(scheduler)
    assert again.num_cached_tokens == (len(sequence) - 1) // 4 * 4


def test_a_preempted_request_finds_what_is_left_of_it() -> None:
    """Blocks that nobody took meanwhile are found when it comes back: only the rest is computed."""
    limits = SchedulerLimits(
        num_kv_blocks=8, kv_block_size=4, num_request_slots=2, max_step_tokens=32, model_len=32
    )
    scheduler = Scheduler(limits)
    old = scheduler.add(request("old", 11))
    young = scheduler.add(replace(request("young"), prompt_token_ids=tuple(range(50, 65))))
    preempted = False
    while not preempted:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        preempted = bool(scheduled.preempted)
        sampled = {entry.slot: [7] for entry in scheduled.entries if entry.sample}
        scheduler.commit(scheduled, sampled)
    assert scheduler.waiting == [young]
    scheduler.finish(old.request_id)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    (opening,) = scheduled.opened
    assert opening.num_cached == 16, "four full blocks; old took the fifth, which was not full"
    assert opening.token_ids == (*range(50, 65), *[7] * young.num_generated)
    assert young.num_cached_tokens == 0, "usage tells of the first admission"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine that holds requests long if experts are missing."""
    settings = EngineSettings(
        experts_hold_s=30.0, max_num_queued_reqs=500, max_num_queued_tokens=5000, step_timeout_s=5
    )
    async for made in running(settings):
        yield made


async def expect_overdue(answer: Answer, seconds: str) -> None:
    """Fails unless the request ends with a DeadlineError that says how long it took."""
    last = await answer.end()
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, DeadlineError)
    assert f"after {seconds}" in str(last.error)


async def test_a_running_request_ends_at_its_deadline(bench: Bench) -> None:
    """After the step in hand, with the tokens that it had; its neighbour goes on."""
    bench.port.gate.clear()
    late = bench.ask("late", range(3), max_tokens=60, timeout_s=0.2)
    other = bench.ask("other", range(4))
    await bench.hold_step()
    assert not late.ended.is_set()
    await _pass(0.25)
    bench.port.gate.set()
    await expect_overdue(late, "0.")
    assert late.token_ids == continuation(range(3), len(late.token_ids))
    await other.end()
    assert other.token_ids == continuation(range(4), 4)
    await bench.until(IDLE)


async def test_a_waiting_request_ends_at_its_deadline(bench: Bench) -> None:
    """It never got a slot, since all were taken for longer than it could wait."""
    bench.port.gate.clear()
    runs = [bench.ask(f"r{i}", [i], max_tokens=9) for i in range(4)]
    await bench.hold_step()
    late = bench.ask("late", range(3), timeout_s=0.1)
    await _pass(0.15)
    bench.port.gate.set()
    await expect_overdue(late, "0.")
    assert late.token_ids == ()
    for index, answer in enumerate(runs):
        await answer.end()
        assert answer.token_ids == continuation([index], 9)
    assert "started late" not in bench.observer.events


async def test_a_held_request_ends_at_its_deadline(bench: Bench) -> None:
    """While experts are missing nothing is computed, but deadlines hold; nothing wakes the engine
    besides."""
    bench.port.pause((2, 7))
    late = bench.ask("late", range(3), timeout_s=0.3)
    patient = bench.ask("patient", range(4), timeout_s=60.0)
    await expect_overdue(late, "0.3")
    assert not patient.ended.is_set()
    bench.port.pause()
    bench.engine.map_changed()
    await patient.end()
    assert patient.token_ids == continuation(range(4), 4)
    await bench.until(IDLE)


async def test_a_request_without_an_attention_worker_ends_at_its_deadline(bench: Bench) -> None:
    """While the attention worker is started again deadlines hold as well."""
    bench.port.auto_restart = False
    bench.port.gate.clear()
    late = bench.ask("late", range(3), timeout_s=0.3)
    await bench.hold_step()
    bench.port.lose_next("gone")
    bench.port.gate.set()
    await expect_overdue(late, "0.3")
    bench.port.revive(bench.port.initial_limits)
    await bench.until_ready(True)
    await bench.until(IDLE)


async def test_200_requests_start_in_the_order_of_their_turns(bench: Bench) -> None:
    """On four slots and a cache for three, with priorities and clients that go away: whoever starts
    has the first turn of all that wait, so none starves."""
    chance = random.Random(3)
    bench.port.gate.clear()
    first = bench.ask("first", [1], max_tokens=1)
    await bench.hold_step()
    priorities = [chance.choice([0, 0, 0, -1, 1]) for _ in range(200)]
    answers = [
        bench.ask(
            f"r{i}", range(chance.randint(1, 20)), chance.randint(1, 12), priority=priorities[i]
        )
        for i in range(200)
    ]
    gone = set(chance.sample(range(200), 40))
    for index in gone:
        bench.engine.cancel(f"r{index}")
    bench.port.gate.set()
    for answer in (first, *answers):
        await answer.end()
    kept = [index for index in range(200) if index not in gone]
    expected = sorted(kept, key=lambda index: (priorities[index], index))
    events = bench.observer.events
    started = [event.removeprefix("started ") for event in events if event.startswith("started ")]
    assert started == ["first", *(f"r{index}" for index in expected)]
    await bench.until(IDLE)


async def _pass(seconds: float) -> None:
    """Lets a deadline pass."""
    end_s = time.monotonic() + seconds
    await asyncio.to_thread(wait_for, lambda: time.monotonic() >= end_s)
