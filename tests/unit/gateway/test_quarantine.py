"""The engine when expert workers are lost: the request that does it ends, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from expertmesh.errors import QuarantineError
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.sequence import FinishReason
from tests.support.engine_bench import IDLE, WAIT_S, Answer, Bench, running
from tests.support.strict_attention import continuation

POISON = 77


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine with room for four requests at a time."""
    async for made in running(EngineSettings(experts_hold_s=5.0, step_timeout_s=5)):
        yield made


def is_poisonous(token_ids: Sequence[int]) -> bool:
    """Rows of such a prompt take expert workers down."""
    return token_ids[0] == POISON


async def assert_served(answer: Answer, prompt: Sequence[int], num_tokens: int) -> None:
    """Fails unless a request got what it would have got alone."""
    assert (await answer.end()).finish_reason is FinishReason.LENGTH
    assert answer.token_ids == continuation(prompt, num_tokens)


async def test_only_the_guilty_request_ends(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It is told so, log and observer name request and layer, and it costs three expert workers;
    others that run or wait get the same tokens.
    """
    bench.port.kills = is_poisonous
    bench.port.gate.clear()
    with caplog.at_level(logging.ERROR, "gateway.engine"):
        innocent = {name: bench.ask(name, [index], 9) for index, name in enumerate("abc")}
        guilty = bench.ask("guilty", [POISON, 5], 9)
        waiting = bench.ask("waiting", range(5))
        bench.port.gate.set()
        error = (await guilty.end()).error
    assert isinstance(error, QuarantineError)
    assert error.layer == 2
    for index, name in enumerate("abc"):
        await assert_served(innocent[name], [index], 9)
    await assert_served(waiting, range(5), 4)
    assert bench.port.num_killed == 3
    assert [event for event in bench.observer.events if event.startswith("quarantined")] == [
        "quarantined guilty 2"
    ]
    assert "quarantined request guilty" in caplog.text
    assert "layer 2" in caplog.text
    await bench.until(IDLE)


async def test_two_guilty_ones(bench: Bench) -> None:
    """One inquiry finds both: each costs one expert worker more."""
    bench.port.kills = is_poisonous
    bench.port.gate.clear()
    innocent = bench.ask("innocent", [3], 20)
    await bench.hold_step()
    first, second = bench.ask("first", [POISON]), bench.ask("second", [POISON, 1])
    bench.port.gate.set()
    for answer in (first, second):
        assert isinstance((await answer.end()).error, QuarantineError)
    await assert_served(innocent, [3], 20)
    assert bench.port.num_killed == 4


async def test_a_request_that_turns_poisonous(bench: Bench) -> None:
    """Tokens that it has generated do it: those before are kept, and it ends."""
    bench.port.kills = lambda token_ids: token_ids[0] == POISON and len(token_ids) > 4
    innocent = bench.ask("innocent", [3], 20)
    guilty = bench.ask("guilty", [POISON], 20)
    assert isinstance((await guilty.end()).error, QuarantineError)
    assert guilty.token_ids == continuation([POISON], 4)
    await assert_served(innocent, [3], 20)


async def test_expert_workers_that_die_by_chance(bench: Bench) -> None:
    """Two are killed within a step: all are computed alone once, and go on together."""
    struck: list[Sequence[int]] = []

    def strike(token_ids: Sequence[int]) -> bool:
        if token_ids[0] == 1 and not struck:
            struck.append(token_ids)
            return True
        return False

    bench.port.kills = strike
    bench.port.gate.clear()
    answers = [bench.ask("a", [0], 20)]
    await bench.hold_step()
    answers += [bench.ask(name, [index], 20) for index, name in enumerate("bc", start=1)]
    bench.port.gate.set()
    for index, answer in enumerate(answers):
        await assert_served(answer, [index], 20)
    assert bench.port.num_killed == 2
    steps = [step for step in bench.port.steps if step.cautious]
    assert [len(step.scheduled) for step in steps] == [1, 1, 1]
    assert not bench.port.steps[-1].cautious


async def test_chance_that_strikes_again(bench: Bench) -> None:
    """A request that is computed alone loses one in another layer: no proof, it goes on."""
    lethal = iter([2, 0])

    def strike(token_ids: Sequence[int]) -> bool:
        bench.port.lethal_layer = next(lethal, -1)
        return bench.port.lethal_layer >= 0

    bench.port.kills = strike
    answer = bench.ask("a", [4], 6)
    await assert_served(answer, [4], 6)
    assert bench.port.num_killed == 3


async def test_experts_that_are_missing_meanwhile(bench: Bench) -> None:
    """Losses leave experts without a copy: the inquiry waits for them, and goes on."""
    paused = threading.Event()

    def miss(response: pb.StepResponse) -> None:
        if response.status == pb.StepResponse.STATUS_LETHAL and bench.port.num_killed == 2:
            bench.port.pause((0, 1))
        elif response.status == pb.StepResponse.STATUS_PAUSED:
            paused.set()

    bench.port.kills = is_poisonous
    bench.port.spoil_result(None, miss)
    innocent, guilty = bench.ask("innocent", [3], 20), bench.ask("guilty", [POISON])
    assert await asyncio.to_thread(paused.wait, WAIT_S)
    bench.port.pause()
    bench.engine.map_changed()
    assert isinstance((await guilty.end()).error, QuarantineError)
    await assert_served(innocent, [3], 20)
    assert bench.port.num_killed == 3


async def test_a_suspect_may_be_cancelled(bench: Bench) -> None:
    """The others go on, and new requests are taken again."""
    bench.port.kills = is_poisonous
    guilty, innocent = bench.ask("guilty", [POISON]), bench.ask("innocent", [3])
    bench.engine.cancel("guilty")
    await guilty.end()
    await assert_served(innocent, [3], 4)
    await assert_served(bench.ask("new", [5]), [5], 4)


async def test_an_attention_worker_that_is_lost_meanwhile(bench: Bench) -> None:
    """Nobody is suspected by its successor until expert workers are lost again."""
    bench.port.kills = is_poisonous
    bench.port.lose_at(2, "it crashed")
    guilty, innocent = bench.ask("guilty", [POISON]), bench.ask("innocent", [3])
    assert isinstance((await guilty.end()).error, QuarantineError)
    await assert_served(innocent, [3], 4)
    assert bench.port.restarts == ["it crashed"]
