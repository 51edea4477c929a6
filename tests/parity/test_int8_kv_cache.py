"""Models whose keys and values are held as int8: close to those that hold them plainly, and exact.

What a request gets alone, computed in one step with blocks for all of it, is the reference for
every bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attention_worker import worker
from attention_worker.model_runner import ModelRunner
from attention_worker.worker import LoadedModel, load_and_warm_up
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError
from expertmesh.model_config import DtypeName
from expertmesh.settings import EngineSettings, KvCacheDtype
from gateway.sequence import SamplingParams
from tests.conftest import Models
from tests.support.family_folders import FamilyFolders
from tests.support.oracle import prompts
from tests.support.parity import Traffic, bits, drive
from tests.support.runner_driver import make_runner
from tests.support.scheduled_runner import ScheduledRunner
from tests.support.tiny_checkpoints import MIXTRAL

NUM_TOKENS = 10
LONG = SamplingParams(40, temperature=0, ignore_eos=True)
STEMS = prompts(MIXTRAL.vocab_size, [40, 33], seed=31)
PROMPTS = [
    [*stem, *tail] for tail in prompts(MIXTRAL.vocab_size, [1, 13], seed=32) for stem in STEMS
]
WINDOWS = (None, 12)


@pytest.fixture(scope="module")
def mixtral(models: Models) -> Path:
    """Three layers with experts."""
    return models.tiny(MIXTRAL)


def _runner(
    model_dir: Path, dtype: DtypeName, *, int8: bool = True, num_blocks: int = 600, block: int = 4
) -> ModelRunner:
    return make_runner(
        model_dir,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=block,
        sliding_windows=WINDOWS,
        int8_kv=int8,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_close_to_those_of_plain_keys_and_values(
    mixtral: Path, dtype: DtypeName
) -> None:
    """Of first tokens, whose prompts are the same, within a part of how logits spread. They are far
    more peaked than those of real models: those of the demo model differ by 1 %."""
    plain, rough = (
        drive(_runner(mixtral, dtype, int8=int8), Traffic(512), PROMPTS, 1)
        for int8 in (False, True)
    )
    expected_RV, actual_RV = (np.stack([r.logits[0] for r in runs]) for runs in (plain, rough))
    spread = float(expected_RV.std())
    difference_RV = np.abs(expected_RV - actual_RV)
    assert 0 < float(np.sqrt((difference_RV**2).mean())) < 0.1 * spread
    assert float(difference_RV.max()) < 0.35 * spread


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_batch_changes_a_bit(mixtral: Path, dtype: DtypeName) -> None:
    """Alone or together, in one step or in chunks, in blocks of any size; freed blocks are NaN."""
    alone = [
        bits(drive(_runner(mixtral, dtype), Traffic(512), [prompt], NUM_TOKENS))[0]
        for prompt in PROMPTS
    ]
    for block, traffic in ((4, Traffic(512)), (4, Traffic(7, budget=20)), (16, Traffic(33))):
        runner = _runner(mixtral, dtype, block=block)
        assert bits(drive(runner, traffic, PROMPTS, NUM_TOKENS)) == alone


def test_preemption_and_prefixes_change_no_bit(mixtral: Path) -> None:
    """Blocks carry their factors: found again by another request, or taken and computed again."""
    alone = []
    for prompt in PROMPTS:
        served = ScheduledRunner(_runner(mixtral, "float32"), prefix_caching=False)
        served.ask("alone", prompt, LONG)
        served.run()
        alone.append(served.logits["alone"])
    runs = []
    for num_blocks in (600, 80):
        served = ScheduledRunner(_runner(mixtral, "float32", num_blocks=num_blocks))
        runs.append(served)
        for turn in ("first", "again"):
            for index, prompt in enumerate(PROMPTS):
                served.ask(f"{turn}{index}", prompt, LONG)
            served.run()
            assert [served.logits[f"{turn}{index}"] for index in range(len(PROMPTS))] == alone
    assert all(served.scheduler.num_prefix_hit for served in runs)
    assert runs[1].num_preemptions > 0


def test_a_worker_that_is_told_so_has_room_for_more_tokens(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same memory: three times as many as in float32, and factors cost less than a third."""
    monkeypatch.setattr(worker, "available_memory", lambda _: 2**24)

    def load(kv_cache_dtype: KvCacheDtype) -> LoadedModel:
        engine = EngineSettings(max_num_seqs=1024, kv_cache_dtype=kv_cache_dtype)
        settings = AttentionWorkerSettings(colocated=True, engine=engine)
        loaded = load_and_warm_up(settings, Checkpoint.open(mixtral))
        loaded.experts.close()
        return loaded

    plain, int8 = load("auto"), load("int8")
    assert (plain.kv.pool.dtype, int8.kv.pool.dtype) == (torch.float32, torch.int8)
    assert int8.kv.num_blocks > 3 * plain.kv.num_blocks
    assert int8.kv.pool.nbytes <= plain.kv.pool.nbytes + int8.kv.block_bytes


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("deepseek_v2", "cpu", "the model has latent attention, which cannot be held so"),
        ("mixtral", "cuda", "the device is cuda, and only kernels for cpu take it"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    tmp_path: Path, name: str, device: str, message: str
) -> None:
    """Before weights are loaded, with the option to leave out."""
    checkpoint = Checkpoint.open(FamilyFolders(tmp_path).served(name))
    engine = EngineSettings(kv_cache_dtype="int8")
    settings = AttentionWorkerSettings(device=device, engine=engine)
    with pytest.raises(SettingsError, match=f"kv_cache_dtype is int8, but {message}") as refusal:
        load_and_warm_up(settings, checkpoint)
    assert refusal.value.fix == "use --kv-cache-dtype auto"
