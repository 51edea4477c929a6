"""An engine over a scripted attention worker, for tests of its decisions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from expertmesh.settings import EngineSettings
from gateway.engine.engine import Engine
from gateway.engine.engine_load import EngineCounters
from gateway.engine.engine_observer import EngineObserver
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.sequence import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
)
from tests.support.strict_attention import EOS, ScriptedPort

LIMITS = SchedulerLimits(
    num_kv_blocks=16, kv_block_size=4, num_request_slots=4, max_step_tokens=8, model_len=64
)
IDLE = EngineStats(0, 0, 0, 16, 0, 4)
WAIT_S = 10.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        pause.wait(0.005)


class Answer:
    """Outputs of one request as they come."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.first = asyncio.Event()
        self.ended = asyncio.Event()

    def sink(self, output: RequestOutput) -> None:
        """The request's sink."""
        self.outputs.append(output)
        self.first.set()
        if output.finish_reason is not None:
            self.ended.set()

    async def end(self) -> RequestOutput:
        """The last output."""
        await asyncio.wait_for(self.ended.wait(), WAIT_S)
        return self.outputs[-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(token for output in self.outputs for token in output.token_ids)


class Recorder(EngineObserver):
    """Remembers what the engine tells."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.step_times: list[float] = []

    def request_started(self, request: GenerationRequest, queue_s: float) -> None:
        self.events.append(f"started {request.request_id}")

    def first_token(self, request: GenerationRequest, since_arrival_s: float) -> None:
        self.events.append(f"first {request.request_id}")

    def next_token(self, request: GenerationRequest, since_last_s: float) -> None:
        self.events.append(f"next {request.request_id}")

    def request_finished(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        num_generated: int,
        since_arrival_s: float,
    ) -> None:
        self.events.append(f"finished {request.request_id} {reason} {num_generated}")

    def request_quarantined(self, request: GenerationRequest, layer: int) -> None:
        self.events.append(f"quarantined {request.request_id} {layer}")

    def step_done(self, num_tokens: int, duration_s: float, expert_wait_s: float) -> None:
        self.step_times.append(duration_s)


@dataclass
class Bench:
    """A running engine and its scripted attention worker."""

    engine: Engine
    port: ScriptedPort
    observer: Recorder

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Answer:
        """Submits a greedy request, with more sampling parameters."""
        answer = Answer()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, **more)
        now_s = time.monotonic()
        self.engine.submit(
            GenerationRequest(
                name,
                tuple(prompt),
                params,
                answer.sink,
                now_s,
                priority=priority,
                deadline_s=None if timeout_s is None else now_s + timeout_s,
            )
        )
        return answer

    async def until(self, expected: EngineStats) -> None:
        """Waits until the engine's load is this, whatever its counters say."""
        await asyncio.to_thread(wait_for, lambda: self.load() == expected)

    def load(self) -> EngineStats:
        """Load without the counters of what happened."""
        counters = [*vars(EngineCounters()), "num_prefix_queried", "num_prefix_hit"]
        return replace(self.engine.stats(), **dict.fromkeys(counters, 0))

    async def until_ready(self, expected: bool) -> None:
        """Waits until the engine is ready, or is not."""
        await asyncio.to_thread(wait_for, lambda: self.engine.ready == expected)

    async def hold_step(self) -> None:
        """Returns when the engine waits for a result, which stays away until the gate opens."""
        assert await asyncio.to_thread(self.port.waiting.wait, WAIT_S)


async def running(settings: EngineSettings) -> AsyncIterator[Bench]:
    """A running engine; it has ended without leaving a thread when the loop over this ends."""
    port, observer = ScriptedPort(LIMITS), Recorder()
    engine = Engine(
        port, settings, asyncio.get_running_loop(), eos_token_ids=[EOS], observer=observer
    )
    engine.start()
    yield Bench(engine, port, observer)
    port.gate.set()
    assert await asyncio.to_thread(engine.stop, WAIT_S)
    assert "engine" not in [thread.name for thread in threading.enumerate()]
