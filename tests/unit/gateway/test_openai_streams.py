"""GenerationFrontend and its streams: merging for slow readers, cancelling, aborting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from expertmesh.errors import EngineError, OverloadedError, RequestError
from gateway.mesh.mesh_status import MeshStatus
from gateway.sequence import FinishReason, RequestOutput, SamplingParams
from gateway.service import GenerationFrontend, Prompt
from tests.support.scripted_engine import ScriptedEngine, served_model

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that says only what the test emits."""
    return ScriptedEngine(served_model().tokenizer, manual=True)


@pytest.fixture
def frontend(engine: ScriptedEngine) -> Iterator[GenerationFrontend]:
    """A frontend over it."""
    frontend = GenerationFrontend(engine, served_model(), MeshStatus)
    yield frontend
    frontend.close()


async def test_generate_yields_until_the_end(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """Outputs come as they are emitted; the last one ends the iteration; nothing is cancelled."""
    outputs = frontend.generate("r", [1, 2], PARAMS)
    first = asyncio.ensure_future(anext(outputs))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    engine.emit("a")
    assert (await first).text == "a"
    engine.emit("b", finish_reason=FinishReason.STOP)
    assert [output.text async for output in outputs] == ["b"]
    assert engine.cancelled == []
    assert not frontend.abort("r")


async def test_leaving_early_cancels(engine: ScriptedEngine, frontend: GenerationFrontend) -> None:
    """Closing the iteration cancels the request, once."""
    outputs = frontend.generate("r", [1], PARAMS)
    first = asyncio.ensure_future(anext(outputs))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    engine.emit("a")
    await first
    await outputs.aclose()  # type: ignore[attr-defined]
    assert engine.cancelled == ["r"]
    engine.emit("late")


async def test_a_slow_reader_gets_merged_outputs(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """What waits for a reader is kept in few pieces, and nothing is lost or reordered."""
    with frontend.open([Prompt("r", (1,), PARAMS)]) as stream:
        for number in range(1000):
            engine.emit(f"{number},")
        assert len(stream._pending[0]) <= 64
        ((index, output),) = await stream.next() or ()
        expected = "".join(f"{number}," for number in range(1000))
        assert (index, output.text, len(output.token_ids)) == (0, expected, len(expected))
        assert output.finish_reason is None
        assert await stream.next(timeout_s=0.01) is None


async def test_text_before_an_error_is_delivered(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """An error comes after everything that was generated before it."""
    with frontend.open([Prompt("r", (1,), PARAMS)]) as stream:
        engine.emit("a")
        engine.emit(finish_reason=FinishReason.ERROR, error=EngineError("broken"))
        assert [output.text for _, output in await stream.next() or ()] == ["a"]
        assert not stream.done
        with pytest.raises(EngineError, match="broken"):
            await stream.next()
        assert stream.done


async def test_one_failure_ends_the_others(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """If a prompt of a call fails, leaving the stream cancels the others only."""
    prompts = [Prompt("a", (1,), PARAMS), Prompt("b", (1,), PARAMS)]
    with frontend.open(prompts) as stream:
        engine.emit(index=0, finish_reason=FinishReason.ERROR, error=None)
        with pytest.raises(EngineError):
            await stream.next()
    assert engine.cancelled == ["b"]


async def test_an_aborted_request_ends_at_once(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """Abort cancels in the engine and ends the stream; later outputs are dropped."""
    with frontend.open([Prompt("r", (1,), PARAMS)]) as stream:
        assert frontend.abort("r")
        engine.emit("late", finish_reason=FinishReason.ABORT)
        outputs = await stream.next()
        assert outputs == [(0, RequestOutput("r", finish_reason=FinishReason.ABORT))]
        assert stream.done
    assert engine.cancelled == ["r"]


async def test_ids_are_unique_while_they_run(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """An id in use is refused without touching its owner; afterwards it is free again."""
    with frontend.open([Prompt("r", (1,), PARAMS)]):
        with pytest.raises(RequestError, match="running"):
            frontend.open([Prompt("r", (1,), PARAMS)])
        assert engine.cancelled == []
    frontend.open([Prompt("r", (1,), PARAMS)]).close()
    assert engine.cancelled == ["r", "r"]


async def test_closing_refuses_new_work(
    engine: ScriptedEngine, frontend: GenerationFrontend
) -> None:
    """After stop_accepting requests are refused, and running ones go on."""
    with frontend.open([Prompt("r", (1,), PARAMS)]) as stream:
        frontend.stop_accepting()
        with pytest.raises(OverloadedError, match="stopping"):
            frontend.open([Prompt("s", (1,), PARAMS)])
        engine.emit("x", finish_reason=FinishReason.STOP)
        assert [output.text for _, output in await stream.next() or ()] == ["x"]
