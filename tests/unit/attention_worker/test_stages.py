"""Layers as one kernel against the same layers step by step: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_worker import model as model_module
from attention_worker import model_runner
from attention_worker.experts import ExpertClient, RemoteExperts
from attention_worker.layers.attention_half import Compiled, StepByStep
from attention_worker.model import Model
from attention_worker.stages import (
    CompiledLayers,
    ExchangingLayers,
    OneLayer,
    Stages,
    choose_stages,
)
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.settings import ExpertDtype
from tests.support.family_folders import FamilyFolders
from tests.support.oracle import prompts
from tests.support.parity import Traffic, bits, drive
from tests.support.runner_driver import make_runner
from tests.support.tiny_families import VOCAB_SIZE

PROMPTS = prompts(VOCAB_SIZE, (1, 17, 40, 67), seed=5)
NUM_TOKENS = 6
TRAFFICS = (Traffic(512), Traffic(7, budget=40, block_size=5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FamilyFolders:
    """Checkpoints of all families."""
    return FamilyFolders(tmp_path_factory.mktemp("families"))


def _check(folder: Path, dtype: DtypeName, expert_dtype: ExpertDtype, kind: type) -> None:
    """All logits as one kernel has them are those of one kernel after the other."""
    for traffic in TRAFFICS:
        found = []
        for is_plain in (False, True):
            with pytest.MonkeyPatch.context() as patched:
                if is_plain:
                    patched.setattr(model_module, "first_half", StepByStep)
                    patched.setattr(model_runner, "choose_stages", _one_by_one)
                runner = make_runner(
                    folder, dtype=dtype, expert_dtype=expert_dtype, block_size=traffic.block_size
                )
                _check_kinds(runner.model, kind, is_plain=is_plain)
                found.append(bits(drive(runner, traffic, PROMPTS, NUM_TOKENS)))
        assert found[0] == found[1], traffic


def _one_by_one(model: Model, experts: ExpertClient) -> Stages:
    single = tuple(map(OneLayer, model.layers, model.next_norms))
    return Stages(single, single)


def _check_kinds(model: Model, kind: type, *, is_plain: bool) -> None:
    """The test compares what it says."""
    kinds = {type(layer.first_half) for layer in model.layers}
    assert kinds == {StepByStep if is_plain else kind}


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_one_kernel_for_all_layers_gives_the_bits_of_many(
    folders: FamilyFolders, name: str, dtype: DtypeName
) -> None:
    """Biases, sinks, windows, norms of heads, all kinds of gates; in chunks and small blocks."""
    _check(folders.served(name), dtype, "plain", Compiled)


@pytest.mark.parametrize("expert_dtype", ["int8", "int4"])
def test_quantised_experts_too(folders: FamilyFolders, expert_dtype: ExpertDtype) -> None:
    """Weights that describe themselves reach the kernel layer by layer."""
    _check(folders.served("mixtral"), "bfloat16", expert_dtype, Compiled)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_the_attention_half_alone_gives_the_same_bits(folders: FamilyFolders, name: str) -> None:
    """Where the FFN is dense, or has a shared expert."""
    _check(folders.served(name), "bfloat16", "plain", Compiled)


@pytest.mark.parametrize("name", ["gemma2", "mimo_v2_flash", "deepseek_v3"])
def test_layers_without_a_kernel_are_gone_through_one_by_one(
    folders: FamilyFolders, name: str
) -> None:
    """Norms of outputs, scaled values, latent attention."""
    runner = make_runner(folders.served(name))
    assert {type(layer.first_half) for layer in runner.model.layers} == {StepByStep}


def test_as_many_layers_as_possible_are_one_stage(folders: FamilyFolders) -> None:
    """All of them, wherever experts are, if rows travel as they are."""
    runner = make_runner(folders.served("mixtral"))
    stages = runner.stages
    (only,) = stages.few
    assert isinstance(only, CompiledLayers)
    assert len(only.layers.halves) == len(runner.model.layers) == len(stages.pausing)
    checkpoint = Checkpoint.open(folders.served("mixtral"))
    elsewhere = RemoteExperts(checkpoint.config, checkpoint.fingerprint, "float32")
    (exchanging,) = choose_stages(runner.model, elsewhere).few
    assert isinstance(exchanging, ExchangingLayers)
    narrow = RemoteExperts(checkpoint.config, checkpoint.fingerprint, "float32", "bfloat16")
    assert len(choose_stages(runner.model, narrow).few) == len(runner.model.layers)
