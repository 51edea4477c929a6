"""The engine when everything goes wrong: each request ends, with its own tokens or a reason."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from expertmesh.errors import EngineError, OverloadedError
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.engine import Engine
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.sequence import EngineStats, FinishReason, GenerationRequest, SamplingParams
from tests.support.engine_bench import WAIT_S, Answer, Bench, Recorder, wait_for
from tests.support.strict_attention import EOS, ScriptedPort, continuation

LIMITS = SchedulerLimits(
    num_kv_blocks=20, kv_block_size=4, num_request_slots=6, max_step_tokens=16, model_len=64
)
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 9), (6,), (None, 13, 5))
"""Sliding windows of the KV groups; there are blocks for as many tokens in each."""
STEMS = (tuple(range(10, 34)), tuple(range(50, 74)))


class ChaosPort(ScriptedPort):
    """Steps are paused, fail, or give bad logits; attention workers are lost or end: by chance."""

    def __init__(self, seed: int) -> None:
        windows = WINDOWS[seed % len(WINDOWS)]
        num_blocks = LIMITS.num_kv_blocks * len(windows)
        super().__init__(replace(LIMITS, num_kv_blocks=num_blocks, sliding_windows=windows))
        self.on_pause: Callable[[], None] = lambda: None
        self._calm = False
        self.num_faults = 0
        self._chance = random.Random(seed)

    def calm_down(self) -> None:
        """Nothing goes wrong any more, nor what was about to."""
        self._calm = True
        self._failures.clear()
        self._nonfinite.clear()
        self._loss = ""

    def receive(self, timeout_s: float) -> pb.StepResponse:
        self.pause()
        if not self._calm and self._chance.random() < 0.12:
            self.num_faults += 1
            self._spoil_something()
        response = super().receive(timeout_s)
        if response.status == pb.StepResponse.STATUS_PAUSED:
            self.on_pause()
        return response

    def _spoil_something(self) -> None:
        match self._chance.choice(["pause", "pause", "fail", "spoil", "lose", "die"]):
            case "pause":
                self.pause((1, self._chance.randrange(8)))
            case "fail":
                self.fail_next("by chance")
            case "spoil":
                self.spoil(self._chance.randrange(LIMITS.num_request_slots))
            case "lose":
                self.lose_next("by chance")
            case "die":
                self.die()


@pytest.mark.parametrize("num_speculative_tokens", [0, 3], ids=["two-in-flight", "drafts"])
@pytest.mark.parametrize("seed", range(4))
async def test_chaos(seed: int, num_speculative_tokens: int) -> None:
    """150 requests that share prefixes, a third of which is cancelled at some time, while every
    eighth step goes wrong in some way. Afterwards nothing is held, and the engine serves."""
    chance, port = random.Random(seed), ChaosPort(seed)
    settings = EngineSettings(
        max_num_queued_reqs=1000,
        num_speculative_tokens=num_speculative_tokens,
        experts_hold_s=60.0,
    )
    engine = Engine(port, settings, asyncio.get_running_loop(), eos_token_ids=[EOS])
    port.on_pause = engine.map_changed
    if num_speculative_tokens:
        port.num_drafts_of = lambda token_ids: sum(token_ids) % (num_speculative_tokens + 1)
        port.drafts_hold = lambda token_ids: sum(token_ids) % 3
    bench = Bench(engine, port, Recorder())
    engine.start()
    try:
        asked: list[tuple[Answer, tuple[int, ...], int]] = []
        cancelled: set[int] = set()
        for index in range(150):
            prompt = (*chance.choice(STEMS)[: chance.randint(1, 24)], *chance.choices(range(3, 90)))
            max_tokens = chance.randint(1, 20)
            answer = await _submit(engine, f"r{index}", prompt, max_tokens)
            asked.append((answer, prompt, max_tokens))
            if chance.random() < 0.3:
                gone = chance.randrange(index + 1)
                engine.cancel(f"r{gone}")
                cancelled.add(gone)
        for index, (answer, prompt, max_tokens) in enumerate(asked):
            await answer.end()
            _check(answer, prompt, max_tokens, cancelled=index in cancelled)
        assert port.num_faults > 10
        assert bool(num_speculative_tokens) == (engine.stats().num_drafts_accepted > 0)
        port.calm_down()
        await bench.until_ready(True)
        last = bench.ask("last", STEMS[0], 8)
        assert (await last.end()).finish_reason is FinishReason.LENGTH
        assert last.token_ids == continuation(STEMS[0], 8)
        stats = await _idle(bench)
        assert (stats.kv_blocks_used, stats.request_slots_used) == (0, 0)
    finally:
        assert await asyncio.to_thread(engine.stop, WAIT_S)


async def _submit(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int) -> Answer:
    """Asks, again if the attention worker has just been lost."""
    answer = Answer()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    asked = GenerationRequest(name, prompt, params, answer.sink, time.monotonic())
    while True:
        try:
            engine.submit(asked)
        except OverloadedError:
            await asyncio.to_thread(wait_for, lambda: engine.ready)
        else:
            return answer


def _check(answer: Answer, prompt: tuple[int, ...], max_tokens: int, *, cancelled: bool) -> None:
    """Tokens are those of the prompt, all of them unless there is a reason."""
    last = answer.outputs[-1]
    expected = continuation(prompt, max_tokens)
    assert answer.token_ids == expected[: len(answer.token_ids)]
    match last.finish_reason:
        case FinishReason.LENGTH:
            assert answer.token_ids == expected
        case FinishReason.ABORT:
            assert cancelled
        case _:
            assert last.finish_reason is FinishReason.ERROR
            assert isinstance(last.error, EngineError)
    assert sum(output.finish_reason is not None for output in answer.outputs) == 1


async def _idle(bench: Bench) -> EngineStats:
    """Load once nothing runs."""
    await asyncio.to_thread(wait_for, lambda: not bench.load().num_running)
    return bench.load()
