"""`model make-tiny`: checkpoints of every family that transformers loads without a remark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.checkpoint import Checkpoint
from expertmesh.families import FAMILIES
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.quantize import QUANTIZATIONS
from gateway.command.cli import run_command
from tests.support.hub_families import MODEL_TYPES, transformers_type
from tests.support.parameters import parameters_of

TOKENS = torch.arange(3, 123).reshape(3, 40)


def _rename(folder: Path) -> None:
    """Gives the model the type that transformers knows it by."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = transformers_type(config["model_type"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_it_and_predicts_clearly(model_type: str, tmp_path: Path) -> None:
    """No tensor missing or left over, and few positions where the best two tokens are close."""
    folder = tmp_path / "model"
    make_tiny(model_type, folder)
    _rename(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(TOKENS).logits
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    margins = (best - second).flatten()
    assert margins.quantile(0.02) > 0.01
    assert margins.median() > 0.5
    assert logits.argmax(-1).unique().numel() > 20


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_we_open_what_we_made_in_any_type(model_type: str, tmp_path: Path) -> None:
    """Strictly; with bfloat16, biases of the choice stay in float32, as in files on the hub."""
    make_tiny(model_type, tmp_path / "wide")
    make_tiny(model_type, tmp_path / "narrow", dtype="bfloat16")
    checkpoint = Checkpoint.open(tmp_path / "narrow")
    assert checkpoint.config.dtype == "bfloat16"
    wide = {name: t for name, t in parameters_of(checkpoint).items() if t.dtype == "float32"}
    assert all(name.endswith(".selection_bias") for name in wide)
    gates = [layer.ffn.gate for layer in checkpoint.config.layers if hasattr(layer.ffn, "gate")]
    assert len(wide) == sum(gate.selection_bias for gate in gates)
    in_float32 = 2 * checkpoint.attention_nbytes() - sum(t.nbytes for t in wide.values())
    assert in_float32 == Checkpoint.open(tmp_path / "wide").attention_nbytes()


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    """The same bits for the same seed, other ones for another, and each tensor has its own."""
    for name, seed in (("one", 4), ("again", 4), ("other", 5)):
        make_tiny("mixtral", tmp_path / name, seed=seed)
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "again", "other")]
    assert files[0] == files[1] != files[2]
    checkpoint = Checkpoint.open(tmp_path / "one")
    experts = [checkpoint.read_expert(layer, e).down.data for layer in (0, 1) for e in range(4)]
    assert len({expert.tobytes() for expert in experts}) == 8


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantised_models_are_near_the_plain_ones(quantization: str, tmp_path: Path) -> None:
    """Experts come back within the width of a code."""
    model_type = "gpt_oss" if quantization == "mxfp4" else "qwen3_moe"
    make_tiny(model_type, tmp_path / "plain")
    make_tiny(model_type, tmp_path / "small", quantization=quantization)
    plain, small = (
        Checkpoint.open(tmp_path / name).read_expert(0, 1).gate_up for name in ("plain", "small")
    )
    assert small.dtype == "float32"
    error = np.abs(small.data - plain.data).max() / np.abs(plain.data).max()
    assert 0 < error < 0.2


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_can_be_quantised(model_type: str, tmp_path: Path) -> None:
    """Each format that is not for stacked experts alone; opening finds all of its tensors."""
    for quantization in QUANTIZATIONS.keys() - {"mxfp4"}:
        if model_type == "gpt_oss" and quantization.startswith("int"):
            continue  # these formats have no stacked experts, and attention is left plain
        folder = tmp_path / quantization
        make_tiny(model_type, folder, quantization=quantization)
        checkpoint = Checkpoint.open(folder)
        for layer in checkpoint.config.moe_layers:
            assert checkpoint.read_expert(layer, 0).down.dtype == "float32"


def test_command_makes_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the folder, and replaces nothing."""
    folder = tmp_path / "new" / "model"
    arguments = ["model", "make-tiny", "deepseek_v3", str(folder), "--dtype", "bfloat16"]
    assert run_command(arguments) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert run_command(["model", "inspect", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]
    capsys.readouterr()
    assert run_command(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}: exists\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bert", "x"], "family 'bert': expected one of deepseek_v2, "),
        (["llama", "x", "--format", "mxfp4"], "format 'mxfp4': not a format of the family llama"),
        (["llama", "x", "--format", "int3"], "int3"),
        (["llama", "x", "--seed", "one"], "seed"),
    ],
)
def test_command_names_what_is_wrong(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert run_command(["model", "make-tiny", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert list(tmp_path.iterdir()) == []


def test_every_family_is_there() -> None:
    """The families that the documentation promises."""
    assert set(FAMILIES) == {
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2"),
        *("gpt_oss", "mimo_v2_flash"),
    }
