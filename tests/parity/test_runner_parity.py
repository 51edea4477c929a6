"""The model runner against transformers, and against itself: parity and exactness.

Tiny random checkpoints are driven through real steps. Logits are compared teacher-forced with
transformers in FP32; exactness is compared bit by bit, in FP32 and bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expertmesh.model_config import DtypeName
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.oracle import Oracle, prompts
from tests.support.parity import Traffic, bits, compare, drive
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import (
    LLAMA,
    LLAMA_TIED,
    MIXTRAL,
    MIXTRAL_FOUR,
    TinyShape,
    save_tiny,
)

if TYPE_CHECKING:
    from tests.conftest import Models

SHAPES = {
    "llama-llama3": LLAMA,
    "llama-tied": LLAMA_TIED,
    "llama-linear-bias": replace(LLAMA, rope="linear", attention_bias=True, seed=6),
    "mixtral": MIXTRAL,
    "mixtral-one-kv-head": MIXTRAL_FOUR,
    "mixtral-tied": replace(MIXTRAL, tied=True, num_kv_heads=6, num_layers=2, seed=7),
}
LENGTHS = (1, 5, 16, 17, 31, 40, 67)
NUM_TOKENS = 24


TRAFFICS = [Traffic(512), Traffic(16), Traffic(7, budget=40), Traffic(33, block_size=5)]


def _check_parity(model_dir: Path, oracle: Oracle, traffic: Traffic) -> None:
    runner = make_runner(model_dir, num_slots=5, block_size=traffic.block_size)
    requests = drive(runner, traffic, prompts(oracle.vocab_size, LENGTHS), NUM_TOKENS)
    compare(requests, oracle).check()


@pytest.mark.parametrize("traffic", TRAFFICS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_tokens_match_transformers(models: Models, name: str, traffic: Traffic) -> None:
    """Unequal lengths, prompts longer than a chunk, generation across KV block borders."""
    model_dir = models.tiny(SHAPES[name])
    _check_parity(model_dir, models.oracle(model_dir), traffic)


def test_sliding_window_matches_transformers(tmp_path: Path) -> None:
    """Queries see the last 12 keys only, in chunks and in decode."""
    model_dir = save_tiny(tmp_path / "windowed", MIXTRAL_FOUR)
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 12}))
    oracle = Oracle(model_dir)
    assert oracle.model.config.sliding_window == 12
    for traffic in (Traffic(512), Traffic(7, block_size=5)):
        _check_parity(model_dir, oracle, traffic)


EXACT_SHAPES: dict[str, TinyShape] = {"llama": LLAMA, "mixtral": MIXTRAL}


def _bits(
    model_dir: Path, dtype: DtypeName, traffic: Traffic, asked: list[list[int]]
) -> list[bytes]:
    runner = make_runner(model_dir, dtype=dtype, block_size=traffic.block_size)
    return bits(drive(runner, traffic, asked, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXACT_SHAPES)
def test_logits_are_bit_equal_alone_in_batches_and_in_chunks(
    models: Models, name: str, dtype: DtypeName
) -> None:
    """A request's logits depend on the request alone: not on neighbours, chunks or blocks."""
    shape = EXACT_SHAPES[name]
    model_dir = models.tiny(shape)
    asked = prompts(shape.vocab_size, [3 + 11 * index for index in range(16)], seed=1)
    alone = [_bits(model_dir, dtype, Traffic(512), [prompt])[0] for prompt in asked[::5]]
    for traffic in (Traffic(512), Traffic(16), Traffic(7, budget=50), Traffic(33, block_size=5)):
        batch = _bits(model_dir, dtype, traffic, asked)
        assert batch[::5] == alone, traffic


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_preemption_changes_no_bit_and_no_sample(models: Models, dtype: DtypeName) -> None:
    """A seeded request that is recomputed half way goes on with the same logits and tokens."""
    model_dir = models.tiny(MIXTRAL)
    prompt = prompts(MIXTRAL.vocab_size, [21])[0]
    sampling = pb.SamplingSpec(temperature=0.9, top_p=0.95, top_k=20, seed=2**63 + 5)
    driver = RunnerDriver(make_runner(model_dir, dtype=dtype), chunk=16)
    undisturbed = driver.submit(prompt, 12, sampling)
    driver.run()
    preempted = driver.submit(prompt, 12, sampling)
    while len(preempted.output) < 5:
        driver.step()
    driver.preempt(preempted)
    driver.submit(prompt[:9], 3)
    driver.run()
    assert preempted.output == undisturbed.output
    assert bits([preempted]) == bits([undisturbed])
