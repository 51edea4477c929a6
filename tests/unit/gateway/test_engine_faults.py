"""The engine thread when something fails: every request ends, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from expertmesh.errors import (
    ContextLengthError,
    EngineError,
    ExpertUnavailableError,
    OverloadedError,
    RequestError,
    StoppingError,
)
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.engine import MAX_LOSSES
from gateway.sequence import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
)
from tests.support.engine_bench import IDLE, LIMITS, Bench, running, wait_for
from tests.support.strict_attention import continuation, next_token


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine with a short hold and a small queue."""
    settings = EngineSettings(
        experts_hold_s=0.6, max_num_queued_reqs=3, max_num_queued_tokens=40, step_timeout_s=5
    )
    async for made in running(settings):
        yield made


async def test_experts_that_come_back_change_no_token(bench: Bench) -> None:
    """Requests are held while an expert is missing and go on with a newer map, KV kept."""
    bench.port.pause((2, 7))
    answer = bench.ask("a", range(10), max_tokens=5)
    await bench.until(EngineStats(1, 0, 3, 16, 1, 4))
    bench.port.pause()
    bench.engine.map_changed()
    assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert answer.token_ids == continuation(range(10), 5)
    assert bench.port.worker.num_openings == 1


async def test_an_abandoned_step_is_retried_without_news(bench: Bench) -> None:
    """Every 200 ms the step is tried again, though no newer map was announced."""
    bench.port.pause((0, 0))
    answer = bench.ask("a", range(3))
    await bench.until(EngineStats(1, 0, 1, 16, 1, 4))
    bench.port.pause()
    await answer.end()
    assert answer.token_ids == continuation(range(3), 4)


async def test_after_the_hold_time_requests_end_with_the_experts_named(bench: Bench) -> None:
    """A request whose experts do not come back ends with a clear error, and nothing leaks."""
    bench.port.pause((2, 7), (2, 8))
    started = time.monotonic()
    last = await bench.ask("a", range(3)).end()
    assert 0.5 <= time.monotonic() - started < 2.0
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, ExpertUnavailableError)
    assert last.error.missing == ((2, 7), (2, 8))
    assert str(last.error) == (
        "no usable copy of layer 2 expert 7, layer 2 expert 8: expert worker w1 is gone"
    )
    await bench.until(IDLE)
    bench.port.pause()
    assert (await bench.ask("b", [1]).end()).finish_reason is FinishReason.LENGTH


async def test_a_held_request_can_be_cancelled(bench: Bench) -> None:
    """A cancel gets through while requests are held, without waiting for the experts."""
    bench.port.pause((0, 0))
    answer = bench.ask("a", range(3))
    await bench.until(EngineStats(1, 0, 1, 16, 1, 4))
    bench.engine.cancel("a")
    await bench.until(IDLE)
    assert (await answer.end()).finish_reason is FinishReason.ABORT


async def test_a_failed_step_ends_only_its_requests(bench: Bench) -> None:
    """Requests of the failed step end with its message; one that waits goes on."""
    bench.port.gate.clear()
    bench.port.fail_next("the device is on fire")
    hit = bench.ask("hit", range(8))
    await bench.hold_step()
    spared = bench.ask("spared", range(3))
    bench.port.gate.set()
    error = (await hit.end()).error
    assert isinstance(error, EngineError)
    assert str(error) == "step failed: the device is on fire"
    await spared.end()
    assert spared.token_ids == continuation(range(3), 4)
    assert bench.port.restarts == []


async def test_steps_that_keep_failing_restart_the_attention_worker(bench: Bench) -> None:
    """After three failures in a row the attention worker starts over."""
    bench.port.fail_next("no", "no", "no")
    for name in "abc":
        assert (await bench.ask(name, [1]).end()).finish_reason is FinishReason.ERROR
    await bench.until_ready(True)
    answer = bench.ask("d", [1])
    await answer.end()
    assert bench.port.restarts == ["3 steps failed in a row"]
    assert answer.token_ids == continuation([1], 4)


async def test_nonfinite_logits_end_only_their_request(bench: Bench) -> None:
    """The request in the spoiled slot ends with an error, its neighbour goes on."""
    bench.port.gate.clear()
    bench.port.spoil(0)
    spoiled, other = bench.ask("spoiled", range(3)), bench.ask("other", range(4))
    bench.port.gate.set()
    error = (await spoiled.end()).error
    assert isinstance(error, EngineError)
    assert "not a finite number" in str(error)
    await other.end()
    assert other.token_ids == continuation(range(4), 4)


async def test_nobody_reuses_what_a_request_without_finite_logits_computed(bench: Bench) -> None:
    """Its keys and values may be as bad: a request that begins alike computes its own."""
    bench.port.gate.clear()
    bench.port.spoil(0)
    spoiled = bench.ask("spoiled", range(8))
    bench.port.gate.set()
    assert (await spoiled.end()).finish_reason is FinishReason.ERROR
    answer = bench.ask("again", range(8))
    assert (await answer.end()).num_cached_tokens == 0
    assert answer.token_ids == continuation(range(8), 4)
    assert (await bench.ask("third", range(8)).end()).num_cached_tokens == 4


async def test_a_degraded_request_says_so_and_shares_nothing(bench: Bench) -> None:
    """From the token on that was computed without an expert; neither what it had computed by then
    nor what comes after is found by others, who may get right results."""

    def degrade(response: pb.StepResponse) -> None:
        response.degraded_slots.extend(token.slot for token in response.sampled)

    bench.port.spoil_result(2, degrade)
    degraded = bench.ask("degraded", range(8), 8)
    assert (await degraded.end()).is_degraded
    assert not degraded.outputs[0].is_degraded
    again = bench.ask("again", range(8), 8)
    last = await again.end()
    assert (last.is_degraded, last.num_cached_tokens) == (False, 0)
    longer = bench.ask("longer", (*range(8), *continuation(range(8), 5)))
    assert (await longer.end()).num_cached_tokens == 12


async def test_requests_outlive_their_attention_worker(bench: Bench) -> None:
    """Running requests are computed again by the next life, waiting ones for the first time: all
    get the tokens that they would have got."""
    bench.port.gate.clear()
    runs = [bench.ask(f"r{i}", [i], max_tokens=9) for i in range(4)]
    await bench.hold_step()
    waits = bench.ask("waits", range(3))
    bench.port.lose_at(6, "attention-worker-0 was killed by SIGKILL")
    bench.port.gate.set()
    for index, answer in enumerate(runs):
        assert (await answer.end()).finish_reason is FinishReason.LENGTH
        assert answer.token_ids == continuation([index], 9)
    await waits.end()
    assert waits.token_ids == continuation(range(3), 4)
    assert bench.port.restarts == ["attention-worker-0 was killed by SIGKILL"]
    assert bench.engine.ready
    await bench.until(IDLE)


async def test_a_request_that_kills_attention_workers_ends(bench: Bench) -> None:
    """A request that was there each time an attention worker was lost is not tried for ever."""
    for loss in range(MAX_LOSSES):
        bench.port.lose_at(3 + 2 * loss, "it crashed")
    answer = bench.ask("poison", range(3), max_tokens=60)
    error = (await answer.end()).error
    assert isinstance(error, EngineError)
    assert "lost 3 times" in str(error)
    await bench.until_ready(True)
    assert (await bench.ask("b", [1]).end()).finish_reason is FinishReason.LENGTH


async def test_the_death_of_an_idle_attention_worker_is_noticed(bench: Bench) -> None:
    """Without requests too: not ready; what is asked meanwhile waits, and is served afterwards."""
    bench.port.auto_restart = False
    bench.port.die()
    await bench.until_ready(False)
    assert bench.port.restarts == ["attention worker ended"]
    answer = bench.ask("a", [1])
    bench.port.revive(LIMITS)
    await bench.until_ready(True)
    assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert answer.token_ids == continuation([1], 4)


async def test_requests_are_refused_once_an_attention_worker_stays_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the hold time nobody waits any more; one that comes back is used."""
    monkeypatch.setattr("gateway.engine.engine.ATTENTION_HOLD_S", 0.0)
    bench.port.auto_restart = False
    bench.port.die()
    await bench.until_ready(False)
    with pytest.raises(OverloadedError, match="the attention worker is down"):
        bench.ask("a", [1])
    bench.port.revive(LIMITS)
    await bench.until_ready(True)
    assert (await bench.ask("a", [1]).end()).finish_reason is FinishReason.LENGTH


async def test_an_attention_worker_that_ends_before_it_is_used_is_restarted(bench: Bench) -> None:
    """It comes up and ends before the engine looks: another one is started all the same."""
    bench.port.auto_restart = False
    bench.port.die()
    await bench.until_ready(False)
    bench.port.come_and_go()
    await asyncio.to_thread(wait_for, lambda: len(bench.port.restarts) == 2)
    bench.port.revive(LIMITS)
    await bench.until_ready(True)
    assert (await bench.ask("a", [1]).end()).finish_reason is FinishReason.LENGTH


async def test_waiting_requests_do_not_wait_for_ever_for_an_attention_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the attention worker does not come back, queued requests end with an error."""
    monkeypatch.setattr("gateway.engine.engine.ATTENTION_HOLD_S", 0.2)
    bench.port.auto_restart = False
    bench.port.gate.clear()
    bench.port.lose_next("gone")
    runs = [bench.ask(f"r{i}", [i], max_tokens=9) for i in range(4)]
    await bench.hold_step()
    waits = [bench.ask(f"w{i}", [i]) for i in range(3)]
    bench.port.gate.set()
    for answer in (*runs, *waits):
        last = await answer.end()
        assert last.finish_reason is FinishReason.ERROR
    error = waits[-1].outputs[-1].error
    assert isinstance(error, OverloadedError)
    assert str(error) == "the attention worker is down"
    await bench.until(IDLE)


async def test_a_full_queue_refuses_requests(bench: Bench) -> None:
    """Beyond the free slots and the queue's bound a request is refused, with a time to retry."""
    bench.port.gate.clear()
    answers = [bench.ask("r0", [0], max_tokens=1)]
    await bench.hold_step()
    answers += [bench.ask(f"r{index}", [index], max_tokens=1) for index in range(1, 7)]
    with pytest.raises(OverloadedError, match="6 requests are waiting, the limit is 6") as refused:
        bench.ask("r7", [7])
    assert refused.value.retry_after_s > 0
    bench.port.gate.set()
    for answer in answers:
        await answer.end()
    assert (await bench.ask("again", [1]).end()).finish_reason is FinishReason.LENGTH


async def test_waiting_tokens_are_bounded_too(bench: Bench) -> None:
    """Few but long prompts are refused as well; a single one of any length is taken."""
    bench.port.gate.clear()
    bench.ask("r0", [0], max_tokens=1)
    await bench.hold_step()
    long = bench.ask("long", range(50), max_tokens=1)
    with pytest.raises(OverloadedError, match="50 prompt tokens are waiting"):
        bench.ask("more", range(50))
    bench.port.gate.set()
    assert (await long.end()).finish_reason is FinishReason.LENGTH


async def test_bad_requests_are_refused_at_the_door(bench: Bench) -> None:
    """A prompt that can never fit, and an id in use."""
    with pytest.raises(ContextLengthError, match="64"):
        bench.ask("a", range(64))
    bench.port.gate.clear()
    answer = bench.ask("a", [1])
    with pytest.raises(RequestError, match="'a' is in use"):
        bench.ask("a", [2])
    bench.port.gate.set()
    await answer.end()


async def test_a_mistake_of_ours_leaves_nobody_hanging(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """If the engine itself fails, requests end with an error and it goes on."""

    def broken(token_ids: Sequence[int]) -> int:
        raise ZeroDivisionError("a bug")

    bench.port.token_of = broken
    error = (await bench.ask("a", [1]).end()).error
    assert isinstance(error, EngineError)
    bench.port.token_of = next_token
    await bench.until_ready(True)
    assert (await bench.ask("b", [1]).end()).finish_reason is FinishReason.LENGTH
    assert "the engine failed" in caplog.text


async def test_a_sink_that_fails_does_not_harm_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in one sink is logged; other requests get their outputs."""

    def bad_sink(output: RequestOutput) -> None:
        raise ValueError("a bad sink")

    params = SamplingParams(max_tokens=2, temperature=0)
    bench.engine.submit(GenerationRequest("bad", (1,), params, bad_sink, time.monotonic()))
    answer = bench.ask("good", [1])
    await answer.end()
    assert answer.token_ids == continuation([1], 4)
    assert "the sink of request bad failed" in caplog.text


async def test_the_observer_hears_of_a_request(bench: Bench) -> None:
    """Start, first token, next tokens, end: in order, once each."""
    await bench.ask("a", [1, 2], max_tokens=3).end()
    await bench.until(IDLE)
    assert bench.observer.events == [
        "started a",
        "first a",
        "next a",
        "next a",
        "finished a length 3",
    ]
    assert bench.observer.step_times == [0.001] * 3


async def test_stopping_ends_requests_with_an_error() -> None:
    """At the end requests that run or wait get an error, and no new one is taken."""
    async for bench in running(EngineSettings()):
        bench.port.gate.clear()
        answers = [bench.ask(f"r{i}", [i], max_tokens=60) for i in range(6)]
        await bench.hold_step()
        assert not bench.engine.stop(0.01)
        bench.port.gate.set()
        for answer in answers:
            error = (await answer.end()).error
            assert isinstance(error, StoppingError)
        with pytest.raises(StoppingError):
            bench.ask("late", [1])


async def test_an_idle_engine_does_not_run(bench: Bench) -> None:
    """Without work no turn is made: the thread's CPU time stands still."""
    await bench.ask("a", [1]).end()
    await bench.until(IDLE)
    native_id = next(t.native_id for t in threading.enumerate() if t.name == "engine")
    clock = time.pthread_getcpuclockid(
        next(t.ident for t in threading.enumerate() if t.native_id == native_id and t.ident)
    )
    before = time.clock_gettime(clock)
    await asyncio.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.01
