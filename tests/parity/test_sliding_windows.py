"""Layers with and without sliding windows: blocks behind a window are given to others.

What a request gets alone, computed in one step with blocks for all of it, is the reference for
every bit. What is freed is filled with NaN by `RunnerDriver`, or taken in `ScheduledRunner`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attention_worker.drafts import Speculation
from attention_worker.model_runner import ModelRunner
from expertmesh.model_config import DtypeName
from gateway.sequence import SamplingParams
from tests.conftest import Models
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.scheduled_runner import ScheduledRunner
from tests.support.tiny_checkpoints import MIXTRAL

BLOCK = 4
WINDOWS = [(12,), (None, 12), (None, 7, 18), (1, None)]
"""Of the layers in turn: one, two and three KV groups."""
NUM_TOKENS = 10
STEMS = prompts(MIXTRAL.vocab_size, [40, 33], seed=31)
TAILS = prompts(MIXTRAL.vocab_size, [1, 4, 7, 13], seed=32)
PROMPTS = [[*stem, *tail] for tail in TAILS for stem in STEMS]
GREEDY = SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True)

Windows = tuple[int | None, ...]


@pytest.fixture(scope="module")
def mixtral(models: Models) -> Path:
    """Three layers with experts."""
    return models.tiny(MIXTRAL)


def _runner(
    model_dir: Path, windows: Windows, num_blocks: int = 600, dtype: DtypeName = "float32"
) -> ModelRunner:
    return make_runner(
        model_dir, dtype=dtype, num_blocks=num_blocks, block_size=BLOCK, sliding_windows=windows
    )


def _alone(model_dir: Path, windows: Windows, dtype: DtypeName) -> list[list[bytes]]:
    """Logits of each request alone, without a prefix cache."""
    served = ScheduledRunner(_runner(model_dir, windows, dtype=dtype), prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        served.ask(f"r{index}", prompt, GREEDY)
        served.run()
    return [served.logits[f"r{index}"] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("windows", "dtype"), [*((windows, "float32") for windows in WINDOWS), ((None, 12), "bfloat16")]
)
def test_freed_blocks_and_found_prefixes_change_no_bit(
    mixtral: Path, windows: Windows, dtype: DtypeName
) -> None:
    """In chunks and batches, with blocks that hold NaN as soon as they are freed; with a cache
    where each prefix is found the second time; and with one so small that blocks are taken all the
    time."""
    alone = _alone(mixtral, windows, dtype)
    driver = RunnerDriver(_runner(mixtral, windows, dtype=dtype), chunk=9, budget=40)
    driven = [driver.submit(prompt, NUM_TOKENS) for prompt in PROMPTS]
    driver.run()
    assert [[logits_V.tobytes() for logits_V in request.logits] for request in driven] == alone

    served = ScheduledRunner(_runner(mixtral, windows, dtype=dtype))
    assert _serve_twice(served) == alone * 2
    for index, prompt in enumerate(PROMPTS):
        assert served.num_cached[f"again{index}"] == (len(prompt) - 1) // BLOCK * BLOCK

    num_groups = served.scheduler.blocks.groups.num_groups
    scarce = ScheduledRunner(_runner(mixtral, windows, 28 * num_groups, dtype))
    assert _serve_twice(scarce) == alone * 2
    assert 0 < scarce.scheduler.num_prefix_hit < served.scheduler.num_prefix_hit


def _serve_twice(served: ScheduledRunner) -> list[list[bytes]]:
    names = [f"{batch}{index}" for batch in ("first", "again") for index in range(len(PROMPTS))]
    for batch in ("first", "again"):
        for index, prompt in enumerate(PROMPTS):
            served.ask(f"{batch}{index}", prompt, GREEDY)
        served.run()
    return [served.logits[name] for name in names]


def test_a_long_generation_keeps_to_its_window(mixtral: Path) -> None:
    """With windows only, 200 tokens go through a pool of a few blocks; a token less of freeing, or
    of holding, would be an error here."""
    window, prompt = 12, PROMPTS[0][:5]
    params = SamplingParams(200, temperature=0, ignore_eos=True)
    runs = []
    for num_blocks in (200, 19):
        served = ScheduledRunner(_runner(mixtral, (window,), num_blocks))
        served.ask("long", prompt, params)
        most = 0
        while served.scheduler.has_work:
            served.step()
            most = max(most, served.scheduler.blocks.num_used)
        assert most <= -(-window // BLOCK) + 1
        runs.append(served.logits["long"])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 200


def test_wrong_drafts_move_no_window(mixtral: Path) -> None:
    """What is seen is counted from tokens that are there to stay; tokens are those without."""
    prompt = [7, 8, 9, 10] * 6
    undrafted = RunnerDriver(_runner(mixtral, (None, 7)))
    expected = undrafted.submit(prompt, 40)
    undrafted.run()
    runner = make_runner(
        mixtral,
        block_size=BLOCK,
        sliding_windows=(None, 7),
        speculation=Speculation(num_tokens=3, lookup_min=1),
    )
    driver = RunnerDriver(runner)
    request = driver.submit(prompt, 40)
    num_verified = num_accepted = 0
    while not request.finished:
        response = driver.step()
        num_verified += response.num_drafts_verified
        num_accepted += response.num_drafts_accepted
        # What windows are counted from, against the driver's own count.
        assert runner._slots.num_computed_S[request.slot] == request.num_computed
    assert num_accepted < num_verified
    assert request.output == expected.output


def test_the_window_counts(mixtral: Path) -> None:
    """The comparison can fail: other windows give other logits."""
    first = _alone(mixtral, (None, 12), "float32")[0]
    other = _alone(mixtral, (None, 11), "float32")[0]
    assert not np.array_equal(np.frombuffer(first[-1], "<f4"), np.frombuffer(other[-1], "<f4"))
