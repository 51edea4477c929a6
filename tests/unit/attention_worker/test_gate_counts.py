"""Counts of what gates choose are those that requests are told, whichever way rows go."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from attention_worker.gate_counts import GateCounts
from attention_worker.model_runner import ModelRunner
from attention_worker.overlap import StepTime
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import entry_of, expert_server, loaded_store
from tests.support.expert_work import remote
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL

PROMPTS = prompts(64, (1, 9, 23), seed=4)
NUM_TOKENS = 5
ASK = pb.SamplingSpec(return_routed_experts=True)
"""Requests then tell which experts each token had."""


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    """[layers, experts] as requests are told."""
    driver = RunnerDriver(make_runner(checkpoint.model_dir), chunk=8)
    requests = [driver.submit(prompt, NUM_TOKENS, ASK) for prompt in PROMPTS]
    driver.run()
    counts_LE = np.zeros((3, 8), np.int64)
    for request in requests:
        for part in request.routed_experts:
            ids_TLK = np.frombuffer(part.expert_ids, "<u2").reshape(part.num_tokens, 3, 2)
            for layer in range(3):
                counts_LE[layer] += np.bincount(ids_TLK[:, layer].ravel(), minlength=8)
    return counts_LE


class Always:
    """Two micro-batches whenever there are two rows."""

    def should_split(self, num_rows: int) -> bool:
        """As said."""
        return num_rows > 1

    def see(self, time: StepTime) -> None:
        """Learns nothing."""


def _taken(runner: ModelRunner) -> npt.NDArray[np.int64]:
    counts = np.frombuffer(runner.gate_counts.take(), "<u4")
    return counts.reshape(3, 8).astype(np.int64)


def _run(runner: ModelRunner, sampling: pb.SamplingSpec | None = None) -> None:
    driver = RunnerDriver(runner, chunk=8)
    for prompt in PROMPTS:
        driver.submit(prompt, NUM_TOKENS, sampling)
    driver.run()


def test_all_layers_in_one_call(checkpoint: Checkpoint, expected: npt.NDArray[np.int64]) -> None:
    """With the experts in this process; what was taken is not told again."""
    runner = make_runner(checkpoint.model_dir)
    _run(runner)
    assert np.array_equal(_taken(runner), expected)
    assert runner.gate_counts.take() == b""


@pytest.mark.parametrize("direct", [True, False])
def test_experts_elsewhere(
    checkpoint: Checkpoint, expected: npt.NDArray[np.int64], direct: bool
) -> None:
    """All layers in one call with the exchange, and each by itself without."""
    store = loaded_store(checkpoint, "float32")
    with (
        expert_server(store, direct=direct) as server,
        remote(checkpoint, [entry_of(server.state, server.port)], direct=direct) as experts,
    ):
        runner = make_runner(checkpoint.model_dir, experts=experts)
        _run(runner)
    assert np.array_equal(_taken(runner), expected)


def test_two_micro_batches(checkpoint: Checkpoint, expected: npt.NDArray[np.int64]) -> None:
    """Both count."""
    runner = make_runner(checkpoint.model_dir, splitter=Always())
    _run(runner)
    assert np.array_equal(_taken(runner), expected)


def test_a_step_that_is_abandoned_counts_once(
    checkpoint: Checkpoint, expected: npt.NDArray[np.int64]
) -> None:
    """When it is repeated, not before."""
    experts = FlakyExperts(local_experts(checkpoint, "float32"))
    runner = make_runner(checkpoint.model_dir, experts=experts)
    driver = RunnerDriver(runner, chunk=8)
    for prompt in PROMPTS:
        driver.submit(prompt, NUM_TOKENS)
    experts.error = ExpertUnavailableError([(1, 0)])
    assert driver.step().status == pb.StepResponse.STATUS_PAUSED
    assert runner.gate_counts.take() == b""
    experts.error = None
    driver.run()
    assert np.array_equal(_taken(runner), expected)


def test_successive_layers_are_told_apart(checkpoint: Checkpoint) -> None:
    """Two of three, in one piece; the same expert twice in a layer."""
    counts = GateCounts(checkpoint.config)
    ids_LTK = np.array([[[0, 1], [0, 7]], [[7, 6], [5, 4]]], np.int32)
    counts.add([(1, ids_LTK), (0, ids_LTK[:1])])
    found = np.frombuffer(counts.take(), "<u4").reshape(3, 8)
    assert found.tolist() == [
        [2, 1, 0, 0, 0, 0, 0, 1],
        [2, 1, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ]
