"""The model runner on shapes beside those of `test_families.py`, and with seeded samples.

Tiny random checkpoints are driven through real steps. Logits are compared teacher-forced with
transformers in FP32; exactness is compared bit by bit, in FP32 and bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from expertmesh.model_config import DtypeName
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.oracle import prompts
from tests.support.parity import Traffic, bits, compare, drive
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import (
    LLAMA,
    LLAMA_TIED,
    MIXTRAL,
    MIXTRAL_FOUR,
)

if TYPE_CHECKING:
    from tests.conftest import Models

SHAPES = {
    "llama-tied": LLAMA_TIED,
    "llama-linear-bias": replace(LLAMA, rope="linear", attention_bias=True, seed=6),
    "mixtral": MIXTRAL,
    "mixtral-one-kv-head": MIXTRAL_FOUR,
    "mixtral-tied": replace(MIXTRAL, tied=True, num_kv_heads=6, num_layers=2, seed=7),
}
"""What the families' cases do not have."""
LENGTHS = (1, 5, 16, 17, 31, 40, 67)
NUM_TOKENS = 24


@pytest.mark.parametrize("traffic", [Traffic(16), Traffic(33, block_size=5)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_tokens_match_transformers(models: Models, name: str, traffic: Traffic) -> None:
    """Unequal lengths, prompts longer than a chunk, generation across KV block borders."""
    model_dir = models.tiny(SHAPES[name])
    oracle = models.oracle(model_dir)
    runner = make_runner(model_dir, num_slots=5, block_size=traffic.block_size)
    requests = drive(runner, traffic, prompts(oracle.vocab_size, LENGTHS), NUM_TOKENS)
    compare(requests, oracle).check()


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
