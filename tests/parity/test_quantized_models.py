"""Quantised checkpoints served like the checkpoints of what they mean, and like transformers.

transformers loads the same folder and dequantises it in FP32; its weights, saved plainly, are the
model that a quantised one has to equal bit by bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import quantizer_finegrained_fp8, quantizer_mxfp4

from expertmesh.families import FAMILIES
from expertmesh.model_tools.quantize import QUANTIZATIONS, quantize_model
from tests.support.oracle import Oracle, prompts
from tests.support.parity import Traffic, bits, compare, drive
from tests.support.runner_driver import make_runner

CASES = [
    ("deepseek_v3", "fp8"),
    ("deepseek_v3", "int4"),
    ("gpt_oss", "mxfp4"),
    ("mimo_v2_flash", "fp8"),
    ("mixtral", "fp8"),
    ("mixtral", "int4"),
    ("qwen3_moe", "fp8"),
    ("qwen3", "int8"),
]
LENGTHS = (3, 17, 40)
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def _without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for a package that dequantising on a CPU does not use."""
    for module in (quantizer_finegrained_fp8, quantizer_mxfp4):
        monkeypatch.setattr(module, "is_accelerate_available", lambda: True)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_quantised_models_are_those_of_transformers(tmp_path: Path, family: str, name: str) -> None:
    """Logits near transformers', and equal in every bit to those of the dequantised model.

    Experts that stay quantised, where a kernel takes them, add up in another order.
    """
    plain, quantised = _plain_model(tmp_path / "plain", family), tmp_path / "quantised"
    quantize_model(plain, quantised, {**QUANTIZATIONS[name], "dequantize": True})
    oracle = Oracle(quantised)
    asked = prompts(oracle.vocab_size, LENGTHS)
    kept = drive(make_runner(quantised), Traffic(16), asked, NUM_TOKENS)
    compare(kept, oracle).check()
    requests = drive(make_runner(quantised, expert_dtype="plain"), Traffic(16), asked, NUM_TOKENS)
    compare(requests, oracle).check()
    dequantised = _save_dequantised(oracle, plain, tmp_path / "dequantised")
    again = drive(make_runner(dequantised), Traffic(16), asked, NUM_TOKENS)
    assert bits(again) == bits(requests)
    unquantised = drive(make_runner(plain), Traffic(16), asked, NUM_TOKENS)
    assert bits(unquantised) != bits(requests)


@pytest.mark.parametrize(("family", "name"), CASES[:1])
def test_bfloat16_rounds_once(tmp_path: Path, family: str, name: str) -> None:
    """Served in bfloat16, weights are those of the dequantised model rounded to it."""
    plain, quantised = _plain_model(tmp_path / "plain", family), tmp_path / "quantised"
    quantize_model(plain, quantised, {**QUANTIZATIONS[name], "dequantize": True})
    dequantised = _save_dequantised(Oracle(quantised), plain, tmp_path / "dequantised")
    asked = prompts(96, LENGTHS)
    runners = [make_runner(folder, dtype="bfloat16") for folder in (quantised, dequantised)]
    first, second = (bits(drive(runner, Traffic(16), asked, NUM_TOKENS)) for runner in runners)
    assert first == second


def _plain_model(folder: Path, family: str) -> Path:
    raw = dict(FAMILIES[family].tiny)
    config = AutoConfig.for_model(family, **raw)
    config.initializer_range = 0.2
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).float().eval().save_pretrained(folder)
    return folder


def _save_dequantised(oracle: Oracle, plain: Path, folder: Path) -> Path:
    """What transformers made of a quantised folder, as a plain one."""
    raw = json.loads((plain / "config.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).float()
    model.load_state_dict(oracle.model.state_dict())
    model.save_pretrained(folder)
    return folder
