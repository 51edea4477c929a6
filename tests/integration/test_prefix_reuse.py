"""Reusing keys and values of earlier requests changes no bit of any logit.

The gateway's scheduler drives a real model runner, whose experts are in this process or on two
expert worker processes. What each request gets alone, without a prefix cache, is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from attention_worker.experts import RemoteExperts
from attention_worker.model_runner import ModelRunner
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from gateway.engine.block_hashes import BlockHashes
from gateway.sequence import SamplingParams
from tests.conftest import Models
from tests.support.mesh import ExpertProcess, expert_workers
from tests.support.oracle import prompts
from tests.support.runner_driver import make_runner
from tests.support.scheduled_runner import ScheduledRunner
from tests.support.tiny_checkpoints import MIXTRAL_WIDE

BLOCK = 8
NUM_TOKENS = 12
STEMS = prompts(MIXTRAL_WIDE.vocab_size, [48, 45], seed=21)
TAILS = prompts(MIXTRAL_WIDE.vocab_size, [1, 3, 8, 9, 14, 20], seed=22)
PROMPTS = [[*stem, *tail] for tail in TAILS for stem in STEMS]
GREEDY = SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=5, top_p=0.9, frequency_penalty=0.3)
PARAMS = [(GREEDY, SAMPLED)[index % 2] for index in range(len(PROMPTS))]


@dataclass(frozen=True)
class Workers:
    """Two expert worker processes."""

    model_dir: Path
    dtype: DtypeName
    processes: Sequence[ExpertProcess]

    def expert_map(self) -> ExpertMap:
        """Each is asked for every second expert."""
        config = Checkpoint.open(self.model_dir).config
        entries = []
        for index, process in enumerate(self.processes):
            state = process.state()
            share = tuple(range(index, config.num_experts, 2))
            resident = dict.fromkeys(config.moe_layers, share)
            entries.append(
                ExpertWorkerEntry(
                    worker_id=f"worker-{index}",
                    address=process.address,
                    incarnation=state.incarnation,
                    resident=resident,
                    row_credits=state.row_credits,
                )
            )
        return ExpertMap.empty(config).replaced(entries)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def workers(request: pytest.FixtureRequest, models: Models) -> Iterator[Workers]:
    """In FP32, then in bfloat16."""
    dtype: DtypeName = request.param
    model_dir = models.tiny(MIXTRAL_WIDE)
    with expert_workers(model_dir, ["all"] * 2, dtype=dtype) as started:
        yield Workers(model_dir, dtype, started)


@pytest.fixture(scope="module")
def alone(workers: Workers) -> list[list[bytes]]:
    """Logits of each request alone, without a prefix cache, experts in this process."""
    served = ScheduledRunner(_local(workers), prefix_caching=False)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        served.ask(f"r{index}", prompt, params)
        served.run()
    assert not any(served.num_cached.values())
    return [served.logits[f"r{index}"] for index in range(len(PROMPTS))]


def _local(workers: Workers, num_blocks: int = 200) -> ModelRunner:
    return make_runner(
        workers.model_dir, dtype=workers.dtype, num_blocks=num_blocks, block_size=BLOCK
    )


@contextmanager
def _runner(workers: Workers, num_blocks: int, *, remote: bool) -> Iterator[ModelRunner]:
    if not remote:
        yield _local(workers, num_blocks)
        return
    checkpoint = Checkpoint.open(workers.model_dir)
    experts = RemoteExperts(checkpoint.config, checkpoint.fingerprint, workers.dtype)
    with closing(experts):
        experts.update_map(workers.expert_map())
        yield make_runner(
            workers.model_dir,
            dtype=workers.dtype,
            num_blocks=num_blocks,
            block_size=BLOCK,
            experts=experts,
        )


def _ask_all(served: ScheduledRunner, batch: str, salt: str = "") -> None:
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        served.ask(f"{batch}{index}", prompt, params, salt)


def _logits(served: ScheduledRunner, batch: str) -> list[list[bytes]]:
    return [served.logits[f"{batch}{index}"] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("remote", [False, True], ids=["colocated", "two-workers"])
def test_found_prefixes_change_no_bit(
    workers: Workers, alone: list[list[bytes]], remote: bool
) -> None:
    """The second time every full block of a prompt but the last token's is found; another salt
    finds nothing. All get the reference's logits."""
    with _runner(workers, 400, remote=remote) as runner:
        served = ScheduledRunner(runner)
        _ask_all(served, "first")
        served.run()
        _ask_all(served, "again")
        served.run()
        _ask_all(served, "other", salt="other")
        served.run()
    assert _logits(served, "first") == alone
    assert _logits(served, "again") == alone
    assert _logits(served, "other") == alone
    for index, prompt in enumerate(PROMPTS):
        assert served.num_cached[f"again{index}"] == (len(prompt) - 1) // BLOCK * BLOCK
    assert served.num_cached["other0"] == 0


@pytest.mark.parametrize("remote", [False, True], ids=["colocated", "two-workers"])
def test_eviction_and_preemption_change_no_bit(
    workers: Workers, alone: list[list[bytes]], remote: bool
) -> None:
    """With blocks for three requests of twelve: cached blocks are taken away all the time, and
    requests lose theirs, some of which they find again."""
    with _runner(workers, 32, remote=remote) as runner:
        served = ScheduledRunner(runner)
        for batch in ("first", "again"):
            _ask_all(served, batch)
        served.run()
    assert _logits(served, "first") == alone
    assert _logits(served, "again") == alone
    assert served.num_preemptions > 0
    assert 0 < served.scheduler.num_prefix_hit < served.scheduler.num_prefix_queried


def test_the_comparison_can_fail(workers: Workers, alone: list[list[bytes]]) -> None:
    """A cache that gives the blocks of another prompt is seen in the bits."""
    served = ScheduledRunner(_local(workers))
    served.ask("r1", PROMPTS[1], PARAMS[0])
    served.run()
    first = served.ask("wrong", PROMPTS[0], PARAMS[0])
    first.hashes = _hashes_of(PROMPTS[1])
    served.run()
    assert served.num_cached["wrong"] > 0
    assert served.logits["wrong"] != alone[0]


def _hashes_of(prompt: Sequence[int]) -> BlockHashes:
    hashes = BlockHashes(BLOCK)
    hashes.first(prompt, len(prompt) // BLOCK)
    return hashes
