"""Rows that take down each expert worker that computes them: some copies are never asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_worker.calls import Call
from attention_worker.experts import RemoteExperts
from attention_worker.losses import LethalRowsError, Losses
from attention_worker.outcomes import Outcomes, Waiting
from attention_worker.overlap import Splitter, StepTime
from expertmesh.checkpoint import Checkpoint
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1.attention_service_pb2 import StepResponse
from expertmesh.wire_encode import CallId
from expertmesh_kernels.dispatch import WorkerRows
from expertmesh_kernels.router import Routing
from tests.conftest import Models
from tests.support.expert_servers import FaultyServer, faulty_server, loaded_store
from tests.support.expert_work import NUM_EXPERTS, Work, local, remote, right, to_expert, work
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return models.tiny(MIXTRAL)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    """The same."""
    return Checkpoint.open(model)


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


class Mortal:
    """Loses its connections instead of answering."""

    def __init__(self) -> None:
        self.server: FaultyServer | None = None

    def __call__(
        self, request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        assert self.server is not None
        self.server.break_streams()
        return []


@contextmanager
def mortals(
    checkpoint: Checkpoint, shares: Sequence[str], *, direct: bool
) -> Iterator[tuple[list[FaultyServer], RemoteExperts]]:
    """Expert workers with these experts, and their client."""
    with ExitStack() as stack:
        servers = []
        for index, share in enumerate(shares):
            mortal, store = Mortal(), loaded_store(checkpoint, "float32", share)
            entered = faulty_server(store, mortal, f"w{index}", direct=direct)
            mortal.server = stack.enter_context(entered)
            servers.append(mortal.server)
        entries = [server.entry for server in servers]
        yield servers, stack.enter_context(remote(checkpoint, entries, direct=direct))


def to_one_expert(num_rows: int) -> Work:
    """Rows that one expert worker is asked for at a time."""
    ids_T1, weights_T1 = np.full((num_rows, 1), 2, np.int32), np.ones((num_rows, 1), np.float32)
    return replace(work(num_rows), routing=Routing.of(ids_T1, weights_T1, NUM_EXPERTS))


def test_the_third_copy_is_never_asked(checkpoint: Checkpoint, direct: bool) -> None:
    """After two expert workers were lost with the same rows the dispatch fails, and says so."""
    with mortals(checkpoint, ["all"] * 3, direct=direct) as (servers, there):
        with pytest.raises(LethalRowsError) as caught:
            to_one_expert(3).run(there)
        asked = [server.entry.worker_id for server in servers if server.requests]
    assert (caught.value.layer, caught.value.micro_batch) == (1, 0)
    assert caught.value.rows.tolist() == [0, 1, 2]
    assert len(asked) == 2
    assert all(f"expert worker {name} at " in caught.value.detail for name in asked)


def test_a_cautious_step_loses_one(checkpoint: Checkpoint, direct: bool) -> None:
    """Rows that are suspected go to one expert worker at a time, and end with the first loss."""
    with mortals(checkpoint, ["0-3", "4-7"], direct=direct) as (servers, there):
        there.begin_step(2, cautious=True)
        with pytest.raises(LethalRowsError, match="layer 1"):
            to_expert(3, num_rows=2).run(there)
        assert sorted(len(server.requests) for server in servers) == [0, 1]


def test_a_cautious_step_computes_the_same(checkpoint: Checkpoint, direct: bool) -> None:
    """Bit by bit; the next step goes the usual way again."""
    todo = work(9)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                faulty_server(loaded_store(checkpoint, "float32"), right, name, direct=direct)
            )
            for name in ("a", "b")
        ]
        entries = [server.entry for server in servers]
        there = stack.enter_context(remote(checkpoint, entries, direct=direct))
        expected = todo.run(local(checkpoint))
        for step, cautious in enumerate([True, False, True], start=2):
            there.begin_step(step, cautious=cautious)
            assert torch.equal(expected, todo.run(there))


def call(worker: int, *rows: int) -> Call:
    """A call with these rows to an expert worker."""
    count = len(rows)
    ids = np.arange(count, dtype=np.uint32)
    offsets = np.arange(count + 1, dtype=np.uint32)
    sent = WorkerRows(worker, np.array(rows), offsets, ids, np.arange(count), 0)
    return Call(CallId(1, 1, 1, 5, 1), sent, 0.0, Outcomes(Waiting()))


def test_rows_count_and_not_calls() -> None:
    """Only rows that several lost expert workers had are suspected; two calls that one of them had
    are one loss.
    """
    losses = Losses(2)
    losses.add(call(0, 1, 2, 3), "a was lost")
    losses.add(call(1, 4, 5), "b was lost")
    losses.add(call(0, 2, 3), "a was lost with another call")
    with pytest.raises(LethalRowsError) as caught:
        losses.add(call(2, 3, 5, 6), "c was lost")
    assert caught.value.rows.tolist() == [3, 5]
    assert (caught.value.layer, caught.value.micro_batch) == (5, 1)
    assert caught.value.detail.startswith("a was lost; b was lost; ")


class Always(Splitter):
    """Splits every step."""

    def should_split(self, num_rows: int) -> bool:
        return num_rows > 1

    def see(self, step: StepTime) -> None:
        """Learns nothing."""


@pytest.mark.parametrize(
    ("micro_batch", "rows", "suspects"), [(0, [0], [0]), (1, [0, 1], [0, 1]), (1, [2], [1])]
)
def test_suspects_are_named_by_slot(
    model: Path, micro_batch: int, rows: list[int], suspects: list[int]
) -> None:
    """Rows of either half of a step lead to their requests; the step can be repeated."""
    flaky = FlakyExperts(local_experts(Checkpoint.open(model), "float32"))
    driver = RunnerDriver(make_runner(model, experts=flaky, splitter=Always()), chunk=16)
    requests = [driver.submit(prompt, 3) for prompt in prompts(MIXTRAL.vocab_size, [5, 3])]
    flaky.error = LethalRowsError(1, micro_batch, np.array(rows), "w1: it was lost")
    response = driver.step()
    assert response.status == StepResponse.STATUS_LETHAL
    slots = sorted(requests[index].slot for index in suspects)
    assert (list(response.suspect_slots), response.lethal_layer) == (slots, 1)
    assert "w1: it was lost" in response.message
    assert not response.sampled
    flaky.error = None
    driver.run()
    assert all(len(request.output) == 3 for request in requests)
