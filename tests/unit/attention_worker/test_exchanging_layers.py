"""Layers in one call whose exchange with an expert worker fails half way: the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pytest

from attention_worker.experts import RemoteExperts
from attention_worker.stages import ExchangingLayers
from expertmesh.checkpoint import Checkpoint
from expertmesh.v1 import attention_service_pb2 as attention_pb
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import entry_of, expert_server, faulty_server, loaded_store
from tests.support.expert_work import remote, right
from tests.support.oracle import prompts
from tests.support.parity import Traffic, bits, drive
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import MIXTRAL

PROMPTS = prompts(64, (1, 9, 23), seed=2)
TRAFFIC = Traffic(8)
NUM_TOKENS = 6
EVERY = 4
"""One of so many calls goes wrong: in each layer some time."""

Fault = Callable[[pb.ForwardResponse], Iterable[pb.ForwardResponse]]


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[bytes]:
    """Logits with the experts in this process."""
    return bits(drive(make_runner(checkpoint.model_dir), TRAFFIC, PROMPTS, NUM_TOKENS))


def _error(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    reply.error.CopyFrom(
        pb.ForwardError(code=pb.ForwardError.CODE_EXPERT_NOT_RESIDENT, message="gone")
    )
    return [reply]


def _not_finite(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    outputs = np.frombuffer(reply.outputs.data, np.float32).copy()
    outputs[-1] = np.inf
    reply.outputs.data = outputs.tobytes()
    return [reply]


def _of_another_layer(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    other = pb.ForwardResponse.FromString(reply.SerializeToString())
    other.id.layer += 1
    return [other, reply]


def _twice(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    return [reply, reply]


def _garbage(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    reply.outputs.data = reply.outputs.data[:-3]
    return [reply]


def _lost(reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
    raise ConnectionError("the connection ends without an answer")


FAULTS: dict[str, Fault] = {
    "error": _error,
    "not finite": _not_finite,
    "of another layer": _of_another_layer,
    "twice": _twice,
    "short data": _garbage,
    "lost": _lost,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_changes_no_bit(
    checkpoint: Checkpoint, expected: list[bytes], fault: str
) -> None:
    """Another copy answers, or the same expert worker later; the next layers go on in one call."""
    numbers = itertools.count(1)

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        return FAULTS[fault](reply) if next(numbers) % EVERY == 0 else [reply]

    store = loaded_store(checkpoint, "float32")
    with (
        faulty_server(store, answer, "worker-0", direct=True) as faulty,
        expert_server(store, worker_id="worker-1") as good,
    ):
        entries = [faulty.entry, entry_of(good.state, good.port)]
        with remote(checkpoint, entries, direct=True) as experts:
            runner = make_runner(checkpoint.model_dir, experts=experts)
            assert [type(stage) for stage in runner.stages.few] == [ExchangingLayers]
            found = bits(drive(runner, TRAFFIC, PROMPTS, NUM_TOKENS))
            faults = sum(seen.faults for seen in experts.observations())
    assert found == expected
    assert next(numbers) > EVERY, "the faulty expert worker was asked"
    assert faults > 0 or fault in ("of another layer", "twice")


def test_layers_that_cannot_be_exchanged_are_sent_by_themselves(
    checkpoint: Checkpoint, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gRPC, and where there is no memory for the exchange in every second step."""
    store = loaded_store(checkpoint, "float32")
    with expert_server(store, direct=False) as server:
        entry = entry_of(server.state, server.port)
        with remote(checkpoint, [entry]) as experts:
            runner = make_runner(checkpoint.model_dir, experts=experts)
            assert bits(drive(runner, TRAFFIC, PROMPTS, NUM_TOKENS)) == expected
    with expert_server(store) as server:
        entry = entry_of(server.state, server.port)
        with remote(checkpoint, [entry], direct=True) as experts:
            exchange = experts.exchange
            assert exchange is not None
            turns, words_for = itertools.count(), exchange.words_for
            monkeypatch.setattr(
                exchange, "words_for", lambda *rows: words_for(*rows) if next(turns) % 3 else None
            )
            runner = make_runner(checkpoint.model_dir, experts=experts)
            assert bits(drive(runner, TRAFFIC, PROMPTS, NUM_TOKENS)) == expected


def test_no_copy_left_pauses_the_step_and_it_can_be_repeated(
    checkpoint: Checkpoint, expected: list[bytes]
) -> None:
    """What is missing is named; nothing of the step remains."""
    is_broken = True

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        return _error(reply) if is_broken and request.id.layer == 1 else [reply]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), answer, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as experts,
    ):
        runner = make_runner(checkpoint.model_dir, experts=experts)
        driver = RunnerDriver(runner, chunk=TRAFFIC.chunk, budget=TRAFFIC.budget)
        requests = [driver.submit(prompt, NUM_TOKENS) for prompt in PROMPTS]
        paused = driver.step()
        assert paused.status == attention_pb.StepResponse.STATUS_PAUSED
        assert {pair.layer for pair in paused.missing} == {1}
        assert "gone" in paused.message
        is_broken = False
        driver.run()
    assert bits(requests) == expected


def test_who_asks_is_told_the_experts_of_every_layer(checkpoint: Checkpoint) -> None:
    """The same as of experts in this process."""
    sampling = attention_pb.SamplingSpec(return_routed_experts=True)

    def routed(experts: RemoteExperts | None) -> list[npt.NDArray[np.generic]]:
        driver = RunnerDriver(make_runner(checkpoint.model_dir, experts=experts), chunk=8)
        request = driver.submit(PROMPTS[2], NUM_TOKENS, sampling)
        driver.run()
        return [np.frombuffer(part.expert_ids, np.uint16) for part in request.routed_experts]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as experts,
    ):
        there = routed(experts)
    here = routed(None)
    assert len(there) == len(here) > 1
    for found, wanted in zip(there, here, strict=True):
        assert np.array_equal(found, wanted)
