"""Whole models on a CUDA device: against transformers on the CPU, and their exactness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from expertmesh.model_config import DtypeName
from expertmesh_kernels.self_test import experts_fingerprint, numerics_fingerprint
from tests.support.mesh import expert_workers, gateway
from tests.support.oracle import MIN_MARGIN, prompts
from tests.support.parity import Traffic, bits, compare, drive
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import LLAMA_TIED, MIXTRAL, TinyShape

if TYPE_CHECKING:
    from tests.conftest import Models

pytestmark = pytest.mark.gpu

SHAPES = {"llama": LLAMA_TIED, "mixtral": MIXTRAL}
DTYPES: list[DtypeName] = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_test_passes(dtype: DtypeName, device: torch.device) -> None:
    """Rows have the same bits in low tiles and in tall ones; the device has its own numerics."""
    first = numerics_fingerprint(dtype, device)
    assert first == numerics_fingerprint(dtype, device) != numerics_fingerprint(dtype)
    assert experts_fingerprint(dtype, device) != first


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_tokens_match_transformers(
    models: Models, name: str, device: torch.device
) -> None:
    """Unequal lengths, prompts longer than a chunk, generation across KV block borders."""
    model_dir = models.tiny(SHAPES[name])
    oracle = models.oracle(model_dir)
    runner = make_runner(model_dir, num_slots=5, device=str(device))
    asked = prompts(oracle.vocab_size, (1, 5, 16, 17, 40, 67))
    compare(drive(runner, Traffic(16), asked, 24), oracle).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_and_chunks_change_no_bit(
    models: Models, dtype: DtypeName, device: torch.device
) -> None:
    """A request alone, and in the middle of others in other chunks."""
    model_dir = models.tiny(MIXTRAL)
    asked = prompts(MIXTRAL.vocab_size, [21, 70, 3, 55])
    found = []
    for chunk, company in ((64, asked[:1]), (16, asked)):
        driver = RunnerDriver(make_runner(model_dir, dtype=dtype, device=str(device)), chunk=chunk)
        requests = [driver.submit(prompt, 12) for prompt in company]
        driver.run()
        found.append(bits(requests[:1]))
    assert found[0] == found[1]


def test_a_mesh_with_experts_on_the_device(models: Models, device: torch.device) -> None:
    """Two expert workers share one GPU; the tokens are those of transformers."""
    shape: TinyShape = MIXTRAL
    model_dir = models.tiny(shape)
    oracle = models.oracle(model_dir)
    with (
        expert_workers(model_dir, ["0/2", "1/2"], device=str(device)) as workers,
        gateway(model_dir, [worker.address for worker in workers]) as server,
    ):
        for prompt in prompts(shape.vocab_size, [3, 40]):
            expected = oracle.greedy(prompt, 16)
            generated = server.api.complete(prompt, 16)
            sure = int((expected.margins >= MIN_MARGIN).cumprod().sum())
            assert generated.token_ids[:sure] == expected.token_ids[:sure]
