"""Every family against transformers, and against itself: parity and exactness.

Tiny random checkpoints with all options of their family are driven through real steps. Logits are
compared teacher-forced with transformers in FP32, with experts in this process and on two expert
workers; exactness is compared bit by bit, in FP32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from attention_worker.drafts import Speculation
from attention_worker.kv_groups import plan_kv_groups
from attention_worker.model_runner import ModelRunner
from expertmesh.checkpoint import Checkpoint
from expertmesh.kv_groups import KvGroups
from expertmesh.model_config import DtypeName
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.sequence import SamplingParams
from tests.support.expert_servers import entry_of, expert_servers
from tests.support.expert_work import remote
from tests.support.family_folders import FamilyFolders
from tests.support.oracle import prompts
from tests.support.parity import Comparison, Traffic, bits, compare, drive
from tests.support.parity_results import Layout, ParityResult, record
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.scheduled_runner import ScheduledRunner
from tests.support.tiny_families import CASES, VOCAB_SIZE, WINDOW

LENGTHS = (1, 5, 16, 17, 31, 40, 67)
NUM_TOKENS = 24
TRAFFICS = [Traffic(512), Traffic(7, budget=40, block_size=5)]
MORE_TRAFFICS = [Traffic(16), Traffic(33, block_size=WINDOW), Traffic(1, block_size=1)]

MOE = [name for name, case in CASES.items() if case.has_experts]
KINDS = ["gemma2", "gemma3_text", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss", "mimo_v2_flash"]
"""One case of every kind of attention, FFN, norm and cache."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FamilyFolders:
    """Checkpoints of all cases."""
    return FamilyFolders(tmp_path_factory.mktemp("families"))


def _record(name: str, layout: Layout, seen: Comparison) -> None:
    """Notes what was compared, and fails if it is not close enough."""
    record(
        ParityResult(
            model_type=CASES[name].model_type,
            layout=layout,
            max_logit_difference=seen.max_difference,
            tokens_equal=seen.num_equal,
            tokens_compared=seen.num_clear,
        )
    )
    seen.check()


# --- parity ---


@pytest.mark.parametrize("traffic", TRAFFICS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_match_transformers(
    folders: FamilyFolders, name: str, traffic: Traffic
) -> None:
    """Unequal lengths, prompts longer than windows and chunks, decode across block borders."""
    _check_colocated(folders, name, traffic)


@pytest.mark.slow
@pytest.mark.parametrize("traffic", MORE_TRAFFICS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_more_traffic_matches_transformers(
    folders: FamilyFolders, name: str, traffic: Traffic
) -> None:
    """The same in other chunks and blocks, down to single tokens."""
    _check_colocated(folders, name, traffic)


def _check_colocated(folders: FamilyFolders, name: str, traffic: Traffic) -> None:
    runner = make_runner(
        folders.served(name), num_slots=5, num_blocks=2048, block_size=traffic.block_size
    )
    requests = drive(runner, traffic, prompts(VOCAB_SIZE, LENGTHS), NUM_TOKENS)
    _record(name, "colocated", compare(requests, folders.oracle(name)))


@pytest.mark.parametrize("name", MOE)
def test_two_expert_workers_match_transformers(folders: FamilyFolders, name: str) -> None:
    """Experts on two servers, over sockets: transformers' tokens and the bits of one process."""
    traffic = Traffic(16, block_size=5)
    asked = prompts(VOCAB_SIZE, LENGTHS[2:], seed=1)
    with _two_workers(folders.served(name), traffic) as runner:
        requests = drive(runner, traffic, asked, NUM_TOKENS)
    here = make_runner(folders.served(name), num_slots=5, block_size=traffic.block_size)
    assert bits(requests) == bits(drive(here, traffic, asked, NUM_TOKENS))
    _record(name, "2 expert workers", compare(requests, folders.oracle(name)))


@contextmanager
def _two_workers(model_dir: Path, traffic: Traffic) -> Iterator[ModelRunner]:
    checkpoint = Checkpoint.open(model_dir)
    with expert_servers(checkpoint, "float32", ["0/2", "1/2"]) as servers:
        entries = [entry_of(server.state, server.port) for server in servers]
        with remote(checkpoint, entries) as experts:
            yield make_runner(
                model_dir, num_slots=5, block_size=traffic.block_size, experts=experts
            )


# --- exactness ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_bit_equal_alone_in_batches_and_in_chunks(
    folders: FamilyFolders, name: str, dtype: DtypeName
) -> None:
    """A request's logits depend on the request alone: not on neighbours, chunks or blocks."""
    asked = prompts(VOCAB_SIZE, [3 + 11 * index for index in range(8)], seed=1)

    def run(traffic: Traffic, some: Sequence[Sequence[int]]) -> list[bytes]:
        runner = make_runner(folders.served(name), dtype=dtype, block_size=traffic.block_size)
        return bits(drive(runner, traffic, some, 8))

    alone = [run(Traffic(512), [prompt])[0] for prompt in asked[::3]]
    for traffic in (Traffic(512), Traffic(7, budget=50), Traffic(33, block_size=5)):
        assert run(traffic, asked)[::3] == alone, traffic


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_preemption_and_found_prefixes_change_no_bit(
    folders: FamilyFolders, name: str, dtype: DtypeName
) -> None:
    """Requests that start over half way, and those that find a prefix, go on with equal logits."""
    stem, *tails = prompts(VOCAB_SIZE, [21, 1, 6, 13], seed=3)
    asked = [*([*stem, *tail] for tail in tails), *prompts(VOCAB_SIZE, [3, 9, 14], seed=4)]

    def serve(num_blocks: int, *, caching: bool, at_once: bool = True) -> ScheduledRunner:
        runner = make_runner(folders.served(name), dtype=dtype, num_blocks=num_blocks, block_size=4)
        served = ScheduledRunner(runner, prefix_caching=caching)
        for turn in range(2):
            for index, prompt in enumerate(asked):
                served.ask(f"{turn}-{index}", prompt, _GREEDY)
                if not at_once:
                    served.run()
            served.run()
        return served

    alone = serve(400, caching=False, at_once=False)
    found = serve(400, caching=True)
    assert min(found.num_cached[f"1-{index}"] for index in range(len(tails))) > 0
    assert found.logits == alone.logits
    fewest = _blocks_of_one(folders.served(name))
    for num_blocks in range(fewest, 3 * fewest, 2):
        crowded = serve(num_blocks, caching=True)
        assert crowded.logits == alone.logits
        if crowded.num_preemptions > 1:
            return
    pytest.fail("nobody was preempted, however small the pool")


@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_no_bit(folders: FamilyFolders, name: str) -> None:
    """Tokens that are verified together, past windows and block borders, rejected ones included."""
    few = pb.SamplingSpec(allowed_token_ids=(7, 8, 9))  # so that the model repeats itself
    num_steps = []
    found = []
    for speculation in (Speculation(), Speculation(num_tokens=5, lookup_max=4, lookup_min=1)):
        runner = make_runner(folders.served(name), block_size=4, speculation=speculation)
        driver = RunnerDriver(runner, chunk=7)
        requests = [driver.submit([7, 8, 9, 7, 8, 9, 7 + last], 40, few) for last in range(3)]
        driver.run()
        num_steps.append(driver.step_number)
        found.append(bits(requests))
    assert num_steps[1] < num_steps[0], "no draft was accepted"
    assert found[0] == found[1]


_GREEDY = SamplingParams(24, temperature=0, ignore_eos=True)


def _blocks_of_one(model_dir: Path) -> int:
    """Blocks of 4 tokens that the longest of the requests takes."""
    plan = plan_kv_groups(Checkpoint.open(model_dir).config)
    groups = KvGroups.of(4, plan.sliding_windows)
    return groups.sequence_blocks(21 + 13 + 24, max_step_tokens=64)
