"""The engine thread against a scripted attention worker: what requests get, and when they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from expertmesh.settings import EngineSettings
from gateway.sequence import (
    FinishReason,
)
from tests.support.engine_bench import IDLE, Bench, running
from tests.support.strict_attention import EOS, continuation, next_token


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine with a short hold and a small queue."""
    settings = EngineSettings(
        experts_hold_s=0.6, max_num_queued_reqs=3, max_num_queued_tokens=40, step_timeout_s=5
    )
    async for made in running(settings):
        yield made


async def test_a_request_gets_its_tokens_and_leaves_nothing(bench: Bench) -> None:
    """Tokens come one by one, the last with `length`; slot and blocks are free again."""
    answer = bench.ask("a", range(11), max_tokens=5)
    last = await answer.end()
    assert last.finish_reason is FinishReason.LENGTH
    assert answer.token_ids == continuation(range(11), 5)
    await bench.until(IDLE)


async def test_requests_share_steps(bench: Bench) -> None:
    """More requests than slots: each gets its own tokens."""
    answers = [bench.ask(f"r{i}", range(i, i + 3), max_tokens=6) for i in range(6)]
    for index, answer in enumerate(answers):
        await answer.end()
        assert answer.token_ids == continuation(range(index, index + 3), 6)
    await bench.until(IDLE)


async def test_an_end_token_ends_the_output(bench: Bench) -> None:
    """The end token is the last of the token ids, with reason `stop`."""
    bench.port.token_of = lambda token_ids: EOS if len(token_ids) == 5 else next_token(token_ids)
    answer = bench.ask("a", range(3), max_tokens=9)
    assert (await answer.end()).finish_reason is FinishReason.STOP
    assert answer.token_ids == (*continuation(range(3), 2), EOS)


async def test_the_end_token_can_be_ignored(bench: Bench) -> None:
    """With ignore_eos the output goes on past the end token."""
    bench.port.token_of = lambda token_ids: EOS
    answer = bench.ask("a", range(3), max_tokens=3, ignore_eos=True)
    assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert answer.token_ids == (EOS, EOS, EOS)


async def test_the_context_ends_the_output(bench: Bench) -> None:
    """A request stops where the context is full, whatever max_tokens says."""
    answer = bench.ask("a", range(60), max_tokens=1000)
    assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert answer.token_ids == continuation(range(60), 4)


async def test_outputs_of_a_step_come_in_one_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in the same steps cost one call of the event loop per step."""
    loop = asyncio.get_running_loop()
    calls = []
    original = loop.call_soon_threadsafe

    def counting(callback, *args, **kwargs):  # type: ignore[no-untyped-def]
        if threading.current_thread().name == "engine":
            calls.append(callback)
        return original(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    bench.port.gate.clear()
    first = bench.ask("a", [1], max_tokens=1)
    await bench.hold_step()
    answers = [bench.ask("b", range(3), max_tokens=4), bench.ask("c", range(4), max_tokens=4)]
    bench.port.gate.set()
    for answer in (first, *answers):
        await answer.end()
    assert len(calls) == len(bench.port.steps)


async def test_a_cancelled_request_is_freed_after_the_step_in_flight(bench: Bench) -> None:
    """Cancelling during a step: no token of it is lost to others, everything is free after it."""
    bench.port.gate.clear()
    gone = bench.ask("gone", range(5), max_tokens=50)
    await bench.hold_step()
    kept = bench.ask("kept", range(2), max_tokens=3)
    bench.engine.cancel("gone")
    bench.port.gate.set()
    assert (await gone.end()).finish_reason is FinishReason.ABORT
    assert len(gone.token_ids) <= 1
    await kept.end()
    assert kept.token_ids == continuation(range(2), 3)
    await bench.until(IDLE)


async def test_a_waiting_request_can_be_cancelled(bench: Bench) -> None:
    """A request without a slot leaves the queue when it is cancelled."""
    bench.port.gate.clear()
    answers = [bench.ask(f"r{i}", [i], max_tokens=2) for i in range(4)]
    await bench.hold_step()
    late = bench.ask("late", [9])
    bench.engine.cancel("late")
    bench.port.gate.set()
    assert (await late.end()).finish_reason is FinishReason.ABORT
    assert late.token_ids == ()
    for answer in answers:
        await answer.end()


async def test_cancelling_what_is_unknown_does_nothing(bench: Bench) -> None:
    """Unknown and ended ids are ignored."""
    bench.engine.cancel("never")
    answer = bench.ask("a", [1])
    await answer.end()
    bench.engine.cancel("a")
    assert (await bench.ask("a", [1]).end()).finish_reason is FinishReason.LENGTH
