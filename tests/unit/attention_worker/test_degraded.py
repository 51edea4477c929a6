"""The degraded mode: experts that nobody holds are left out where that is allowed, and counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from attention_worker.dropped_experts import without
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh_kernels.router import Routing
from tests.conftest import Models
from tests.support.expert_servers import faulty_server, loaded_store
from tests.support.expert_work import NUM_EXPERTS, Work, local, remote, right, work
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL

JOB = work(40)


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


def expected(checkpoint: Checkpoint, missing: set[int]) -> torch.Tensor:
    """The result without some experts, with those in this process."""
    routing = JOB.routing
    is_out_TK, weights_TK = without(routing.topk_ids_TK, routing.topk_weights_TK, missing)
    assert is_out_TK.any(axis=1).sum() > is_out_TK.all(axis=1).sum() > 0
    assert np.allclose(
        weights_TK.sum(axis=1)[~is_out_TK.all(axis=1)],
        routing.topk_weights_TK.sum(axis=1)[~is_out_TK.all(axis=1)],
    )
    reduced = Routing.of(routing.topk_ids_TK, weights_TK, NUM_EXPERTS)
    return Work(JOB.h_TH, reduced).run(local(checkpoint))


def test_what_nobody_holds_is_left_out(checkpoint: Checkpoint, direct: bool) -> None:
    """Weights of the others are raised to the same sum; a row without any gets zeros."""
    missing = {0, 1, 2, 3}
    num_pairs = int(np.isin(JOB.routing.topk_ids_TK, list(missing)).sum())
    store = loaded_store(checkpoint, "float32", "4-7")
    with (
        faulty_server(store, right, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct, allow_degraded=True) as there,
    ):
        assert torch.equal(expected(checkpoint, missing), JOB.run(there))
        assert (there.take_dropped(), there.take_dropped()) == (num_pairs, 0)
        ((micro_batch, rows),) = there.degraded_rows
        hit_T = np.isin(JOB.routing.topk_ids_TK, list(missing)).any(axis=1)
        assert (micro_batch, rows.tolist()) == (0, np.flatnonzero(hit_T).tolist())
        there.begin_step(2)
        assert not there.degraded_rows


def test_suspects_wait_all_the_same(checkpoint: Checkpoint) -> None:
    """A cautious step is to show what its rows do to experts: it goes without none."""
    store = loaded_store(checkpoint, "float32", "4-7")
    with (
        faulty_server(store, right) as server,
        remote(checkpoint, [server.entry], allow_degraded=True) as there,
    ):
        there.begin_step(2, cautious=True)
        with pytest.raises(ExpertUnavailableError):
            JOB.run(there)
    assert there.take_dropped() == 0


def test_what_is_lost_on_the_way_is_left_out(checkpoint: Checkpoint, direct: bool) -> None:
    """The last copy says no: the rows go without it, and with what others answered."""

    def refuse(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        reply.error.code = pb.ForwardError.CODE_EXPERT_NOT_RESIDENT
        return [reply]

    low, high = (loaded_store(checkpoint, "float32", part) for part in ("0-3", "4-7"))
    with (
        faulty_server(low, refuse, "a", direct=direct) as a,
        faulty_server(high, right, "b", direct=direct) as b,
        remote(checkpoint, [a.entry, b.entry], direct=direct, allow_degraded=True) as there,
    ):
        assert torch.equal(expected(checkpoint, {0, 1, 2, 3}), JOB.run(there))
        assert there.take_dropped() > 0


def test_a_step_names_the_requests_that_it_degraded(models: Models) -> None:
    """By request slot, whichever of their rows it was; the step is committed all the same."""
    model = models.tiny(MIXTRAL)
    flaky = FlakyExperts(local_experts(Checkpoint.open(model), "float32"))
    driver = RunnerDriver(make_runner(model, experts=flaky), chunk=16)
    first, second, third = (driver.submit(prompt, 2) for prompt in prompts(128, [4, 3, 2]))
    flaky.degraded = [(0, np.array([1, 3])), (0, np.array([7]))]
    assert list(driver.step().degraded_slots) == sorted([first.slot, third.slot])
    flaky.degraded = []
    assert not driver.step().degraded_slots
    assert second.finished
