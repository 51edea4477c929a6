"""The same bits whatever surrounds a request: expert workers, neighbours, prefill chunks.

Logits are compared bit by bit with a model runner in this process that calls real expert worker
processes, and log probabilities exactly over HTTP. The colocated runner is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from attention_worker.experts import RemoteExperts
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from tests.conftest import Models
from tests.support.api import Generated
from tests.support.mesh import ExpertProcess, expert_workers, gateway
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import MIXTRAL_WIDE

NUM_WORKERS = 3
NUM_TOKENS = 10
BATCH = 16
PROMPTS = prompts(MIXTRAL_WIDE.vocab_size, [1 + 7 * index for index in range(BATCH)], seed=11)
"""1 to 106 tokens: less than a chunk of 16, and several of them."""


@dataclass(frozen=True)
class Workers:
    """Three expert worker processes that hold every expert each; a map says who is asked."""

    model_dir: Path
    dtype: DtypeName
    processes: Sequence[ExpertProcess]

    def map_of(self, num_workers: int) -> ExpertMap:
        """A map that spreads the experts over the first `num_workers` processes."""
        entries = []
        config = Checkpoint.open(self.model_dir).config
        for index, process in enumerate(self.processes[:num_workers]):
            state = process.state()
            share = tuple(range(index, config.num_experts, num_workers))
            entries.append(
                ExpertWorkerEntry(
                    worker_id=f"worker-{index}",
                    address=process.address,
                    incarnation=state.incarnation,
                    resident=dict.fromkeys(config.moe_layers, share),
                    row_credits=state.row_credits,
                )
            )
        return ExpertMap.empty(config).replaced(entries)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def workers(request: pytest.FixtureRequest, models: Models) -> Iterator[Workers]:
    """Expert workers in FP32, then in bfloat16."""
    dtype: DtypeName = request.param
    model_dir = models.tiny(MIXTRAL_WIDE)
    with expert_workers(model_dir, ["all"] * NUM_WORKERS, dtype=dtype) as started:
        yield Workers(model_dir, dtype, started)


Bits = list[bytes]
"""Of each request: the logits of all its output tokens."""


def _drive(driver: RunnerDriver, asked: Sequence[Sequence[int]]) -> Bits:
    requests = [driver.submit(prompt, NUM_TOKENS) for prompt in asked]
    driver.run()
    return [np.stack(request.logits).tobytes() for request in requests]


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Bits:
    """Each prompt alone, experts in the attention worker, prompts in one chunk."""
    driver = RunnerDriver(make_runner(workers.model_dir, dtype=workers.dtype), chunk=512)
    return [_drive(driver, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_logits_are_bit_equal(
    workers: Workers, reference: Bits, num_workers: int, chunk: int
) -> None:
    """A batch of 16 on 1, 2 or 3 expert workers, or none, in either chunk: the reference's bits."""
    if num_workers == 0:
        runner = make_runner(workers.model_dir, dtype=workers.dtype)
        assert reference == _drive(RunnerDriver(runner, chunk=chunk), PROMPTS)
        return
    checkpoint = Checkpoint.open(workers.model_dir)
    experts = RemoteExperts(checkpoint.config, checkpoint.fingerprint, workers.dtype)
    with closing(experts):
        experts.update_map(workers.map_of(num_workers))
        runner = make_runner(workers.model_dir, dtype=workers.dtype, experts=experts)
        driver = RunnerDriver(runner, chunk=chunk)
        before = [process.state().load.calls for process in workers.processes]
        batch = _drive(driver, PROMPTS)
        alone = [_drive(driver, [prompt])[0] for prompt in PROMPTS[::5]]
        after = [process.state().load.calls for process in workers.processes]
    assert reference == batch
    assert reference[::5] == alone
    used = [now > then for now, then in zip(after, before, strict=True)]
    assert used == [True] * num_workers + [False] * (NUM_WORKERS - num_workers)


def test_the_comparison_can_fail(workers: Workers, reference: Bits) -> None:
    """A small change of one weight changes the bits that are compared."""
    runner = make_runner(workers.model_dir, dtype=workers.dtype)
    runner.model.embed_VH[PROMPTS[0][0], 0] *= 1.01
    assert reference[0] != _drive(RunnerDriver(runner), PROMPTS[:1])[0]


def _answers(workers: Workers, addresses: list[str], *flags: str) -> dict[str, list[Generated]]:
    with (
        gateway(workers.model_dir, addresses, *flags, dtype=workers.dtype) as server,
        ThreadPoolExecutor(BATCH, thread_name_prefix="client") as pool,
    ):

        def ask(prompt: list[int]) -> Generated:
            return server.api.complete(prompt, 20)

        alone = [ask(prompt) for prompt in PROMPTS]
        return {"alone": alone, "together": list(pool.map(ask, PROMPTS))}


@pytest.mark.parametrize(
    "workers", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"], indirect=True
)
def test_log_probabilities_over_http_are_equal(workers: Workers) -> None:
    """Alone or 16 at once, colocated or on expert workers, other chunks and KV blocks."""
    before = [process.state().load.calls for process in workers.processes[:2]]
    addresses = [process.address for process in workers.processes[:2]]
    answers = {
        "colocated": _answers(workers, ["local"], "--max-num-batched-tokens", "512"),
        "mesh": _answers(
            workers, addresses, "--max-num-batched-tokens", "16", "--kv-block-size", "5"
        ),
    }
    after = [process.state().load.calls for process in workers.processes[:2]]
    assert all(now > then for now, then in zip(after, before, strict=True)), "both were asked"
    reference = answers["colocated"]["alone"]
    assert len({answer.token_ids for answer in reference}) == BATCH
    for served in answers.values():
        for measured in served.values():
            assert reference == measured
