"""Several engines behind the face of one: spreading, loss of one, load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from expertmesh.errors import OverloadedError, RequestError
from expertmesh.settings import EngineSettings
from gateway.engine.engine import Engine
from gateway.engine.engine_pool import EnginePool
from gateway.sequence import FinishReason, GenerationRequest, SamplingParams
from tests.support.engine_bench import LIMITS, WAIT_S, Answer, wait_for
from tests.support.strict_attention import ScriptedPort, continuation

SETTINGS = EngineSettings(max_num_queued_reqs=1, step_timeout_s=5)


@dataclass
class Pool:
    """Two engines over scripted attention workers."""

    pool: EnginePool
    ports: tuple[ScriptedPort, ScriptedPort]

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int = 4) -> Answer:
        """Submits a greedy request."""
        answer = Answer()
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = GenerationRequest(name, tuple(prompt), params, answer.sink, time.monotonic())
        self.pool.submit(request)
        return answer

    @property
    def num_steps(self) -> list[int]:
        """Steps that each attention worker was sent."""
        return [len(port.steps) for port in self.ports]


@pytest.fixture
async def pair() -> AsyncIterator[Pool]:
    """A pool of two."""
    ports = ScriptedPort(LIMITS), ScriptedPort(LIMITS)
    loop = asyncio.get_running_loop()
    engines = [Engine(port, SETTINGS, loop, name=f"engine-{i}") for i, port in enumerate(ports)]
    pool = EnginePool(engines)
    pool.start()
    yield Pool(pool, ports)
    for port in ports:
        port.gate.set()
    assert await asyncio.to_thread(pool.stop, WAIT_S)


async def test_requests_are_spread(pair: Pool) -> None:
    """Both attention workers work, and each request gets its own tokens."""
    answers = [pair.ask(f"r{i}", range(10 * i, 10 * i + 6), 5) for i in range(6)]
    for index, answer in enumerate(answers):
        await answer.end()
        assert answer.token_ids == continuation(range(10 * index, 10 * index + 6), 5)
    assert all(pair.num_steps)
    await asyncio.to_thread(wait_for, lambda: pair.pool.stats().request_slots_used == 0)
    stats = pair.pool.stats()
    assert (stats.request_slots_total, stats.kv_blocks_total) == (8, 32)
    assert stats.num_prefix_queried == 36


async def test_a_common_prefix_is_computed_once(pair: Pool) -> None:
    """The second request goes where the prefix of the first one is."""
    await pair.ask("a", range(40), 1).end()
    answer = pair.ask("b", [*range(40), 77], 1)
    assert (await answer.end()).num_cached_tokens == 40
    assert 0 in pair.num_steps


async def test_the_others_go_on_when_an_attention_worker_is_lost(pair: Pool) -> None:
    """New requests go to the one that is up; those of the lost one are computed again."""
    first, second = pair.ports
    first.auto_restart = False
    first.lose_at(3, "it was killed")
    hit = pair.ask("hit", range(5), 8)
    await asyncio.to_thread(wait_for, lambda: len(first.restarts) == 1)
    assert pair.pool.ready
    others = [pair.ask(f"r{i}", [i], 3) for i in range(3)]
    for answer in others:
        assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert second.steps
    assert not hit.ended.is_set()
    first.revive(LIMITS)
    await hit.end()
    assert hit.token_ids == continuation(range(5), 8)


async def test_without_any_attention_worker_requests_wait(pair: Pool) -> None:
    """One that comes back serves what was asked meanwhile, if it was asked of it."""
    for port in pair.ports:
        port.auto_restart = False
        port.die()
    await asyncio.to_thread(wait_for, lambda: not pair.pool.ready)
    answers = [pair.ask(f"r{index}", [index]) for index in range(4)]
    assert pair.pool.stats().num_waiting == 4
    for port in pair.ports:
        port.revive(LIMITS)
    for index, answer in enumerate(answers):
        await answer.end()
        assert answer.token_ids == continuation([index], 4)


async def test_a_full_queue_sends_requests_to_the_other(pair: Pool) -> None:
    """Only when both are full is a request refused, and nothing of it is left behind."""
    for port in pair.ports:
        port.gate.clear()
    answers: list[Answer] = []
    with contextlib.suppress(OverloadedError):
        answers += (pair.ask(f"r{index}", [index], 1) for index in range(30))
    assert 10 <= len(answers) < 30
    for port in pair.ports:
        port.gate.set()
    for answer in answers:
        await answer.end()
    refused = f"r{len(answers)}"
    assert (await pair.ask(refused, [1], 1).end()).finish_reason is FinishReason.LENGTH


async def test_ids_are_used_once_over_all_engines(pair: Pool) -> None:
    """An id that runs anywhere is refused; cancelling finds it wherever it is."""
    for port in pair.ports:
        port.gate.clear()
    answers = [pair.ask(f"r{i}", [i] * 8, 9) for i in range(2)]
    with pytest.raises(RequestError, match="'r0' is in use"):
        pair.ask("r0", [1])
    pair.pool.cancel("r0")
    pair.pool.cancel("r1")
    pair.pool.cancel("unknown")
    for port in pair.ports:
        port.gate.set()
    for answer in answers:
        assert (await answer.end()).finish_reason is FinishReason.ABORT
