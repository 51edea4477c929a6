"""Experts that a store holds quantised: kept as stored, quantised on load, or expanded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError, SettingsError
from expertmesh.expert_fingerprint import read_fingerprint
from expertmesh.expert_plan import plan_experts
from expertmesh.families.config_reader import Json
from expertmesh.model_config import SILU
from expertmesh.model_tools.quantize import quantize_model
from expertmesh.settings import ExpertDtype
from expertmesh_kernels.grouped_mlp import grouped_mlp
from tests.conftest import Models
from tests.support.quantized_folders import compressed, read_parts, write_parts
from tests.support.tiny_checkpoints import MIXTRAL

INT8 = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
INT4 = compressed(group_size=32)
SMALL_GROUPS = compressed(group_size=8)
FP8: Json = {"quant_method": "fp8", "weight_block_size": [16, 32]}


@pytest.fixture
def plain(models: Models) -> Path:
    """A tiny Mixtral: 3 layers, 8 experts, sizes that groups of 32 divide."""
    return models.tiny(replace(MIXTRAL, hidden_size=64, num_heads=4, intermediate_size=96))


def quantised(plain: Path, folder: Path, quantization: Json) -> Checkpoint:
    """The same, stored quantised."""
    quantize_model(plain, folder, quantization)
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [(INT8, "int8 per channel"), (INT4, "int4 in groups of 32"), (FP8, "fp8 in groups of 32")],
)
def test_what_a_kernel_takes_is_kept(
    plain: Path, tmp_path: Path, quantization: Json, name: str
) -> None:
    """It is small in memory, as told beforehand, and its values are those of the expanded one."""
    checkpoint = quantised(plain, tmp_path / "model", quantization)
    kept = ExpertStore(checkpoint, "float32")
    expanded = ExpertStore(checkpoint, "float32", expert_dtype="plain")
    assert (kept.plan.name, expanded.plan.name) == (name, "float32")
    for store in (kept, expanded):
        store.load(1, 3)
        assert store.residency()[1].fingerprints == (read_fingerprint(checkpoint, 1, 3),)
        assert store.bytes_per_expert <= store.resident_bytes
    assert kept.bytes_per_expert < expanded.bytes_per_expert / 2
    with kept.lease(1) as ours, expanded.lease(1) as theirs:
        for part in ("gate_up", "down"):
            found, wanted = getattr(ours[3], part), getattr(theirs[3], part)
            torch.testing.assert_close(found.weight_KN, wanted.weight_KN, rtol=1e-6, atol=0)


def test_other_formats_are_expanded_and_told(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what and why; results are those of expert_dtype plain."""
    checkpoint = quantised(plain, tmp_path / "model", SMALL_GROUPS)
    with caplog.at_level(logging.INFO):
        store = ExpertStore(checkpoint, "float32")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "stored as packed int4 per group of 8, are expanded to float32" in line
    assert store.plan.name == "float32"
    assert store.code_names == (None,)


@pytest.mark.parametrize(("setting", "steps"), [("int8", 127), ("int4", 7)])
def test_plain_experts_are_quantised_on_load(plain: Path, setting: ExpertDtype, steps: int) -> None:
    """To the nearest codes; the memory told is that of codes and scales."""
    checkpoint = Checkpoint.open(plain)
    store = ExpertStore(checkpoint, "float32", expert_dtype=setting)
    store.load(0, 2)
    wanted = torch.from_numpy(checkpoint.read_expert(0, 2).down.data)
    with store.lease(0) as table:
        found = table[2].down.weight_KN.T
        rows = np.zeros(1, np.int64)
        x_RH = torch.ones(1, store.config.hidden_size)
        assert grouped_mlp(x_RH, rows, rows + 2, table, SILU).isfinite().all()
    peaks = wanted.abs().amax(1, keepdim=True)
    assert bool(((found - wanted).abs() <= peaks / steps * 0.51).all())
    assert store.code_names == (setting,)
    hidden, wide = store.config.hidden_size, store.config.moe_ffn(0).intermediate_size
    codes = 3 * hidden * wide * (1 if setting == "int8" else 0.5)
    assert codes < store.bytes_per_expert < 1.5 * codes


def test_quantising_twice_is_refused(plain: Path, tmp_path: Path) -> None:
    """The line names the setting, the model and how its experts are stored."""
    checkpoint = quantised(plain, tmp_path / "model", INT4)
    with pytest.raises(SettingsError, match="expert_dtype is int8, but the experts of model are"):
        plan_experts(checkpoint, "int8", "float32")


def test_codes_that_stand_for_nothing_are_refused(plain: Path, tmp_path: Path) -> None:
    """NaN among the codes of an expert, by the name of its tensor, when it is loaded."""
    folder = tmp_path / "model"
    quantised(plain, folder, FP8).close()
    parts = read_parts(folder)
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    parts[name].data.view(np.uint8)[2, 3] = 0xFF
    write_parts(folder, parts)
    store = ExpertStore(Checkpoint.open(folder), "float32")
    store.load(0, 1)
    with pytest.raises(CheckpointError, match=f"tensor {name}: holds NaN"):
        store.load(0, 0)
