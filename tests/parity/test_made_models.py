"""What `model make-tiny` makes, plain and quantised, gives transformers' tokens.

The reference computes with what quantised weights mean, in FP32: decoded by transformers itself
where it needs no package for that, else by us.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from expertmesh.checkpoint import Checkpoint
from expertmesh.model_tools.make_tiny import make_tiny
from tests.support.decoded_folders import save_decoded
from tests.support.expert_servers import entry_of, expert_servers
from tests.support.expert_work import remote
from tests.support.hub_families import MODEL_TYPES, transformers_type
from tests.support.oracle import Oracle, prompts
from tests.support.parity import Traffic, bits, compare, drive
from tests.support.runner_driver import make_runner

LENGTHS = (5, 17, 40)
NUM_TOKENS = 16
TRAFFIC = Traffic(16, block_size=5)

QUANTIZED = [  # others: test_quantized_models.py
    ("llama", "fp8"),
    ("qwen2_moe", "int8"),
    ("kimi_k2", "int4"),
]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_plain_models_match_transformers(tmp_path: Path, model_type: str) -> None:
    """Every family, as it is made."""
    folder = tmp_path / "made"
    make_tiny(model_type, folder)
    reference = tmp_path / "reference"
    make_tiny(model_type, reference)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = transformers_type(model_type)
    (reference / "config.json").write_text(json.dumps(config))
    _check(folder, Oracle(reference))


@pytest.mark.parametrize(("model_type", "quantization"), QUANTIZED)
def test_quantised_models_match_their_decoded_weights(
    tmp_path: Path, model_type: str, quantization: str
) -> None:
    """Matrices of attention, shared and routed experts, whatever the format leaves plain."""
    folder = tmp_path / "made"
    make_tiny(model_type, folder, quantization=quantization)
    _check(folder, Oracle(save_decoded(tmp_path / "decoded", folder)))


def test_mxfp4_matches_what_transformers_decodes(tmp_path: Path) -> None:
    """gpt-oss as it is on the hub: stacked, transposed, interleaved, in blocks of 32."""
    folder = tmp_path / "made"
    make_tiny("gpt_oss", folder, quantization="mxfp4")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    _check(folder, Oracle.of(model))


def test_expert_workers_read_quantised_experts(tmp_path: Path) -> None:
    """Each only its own; over sockets, the bits of one process."""
    folder = tmp_path / "made"
    make_tiny("kimi_k2", folder, quantization="int4")
    checkpoint = Checkpoint.open(folder)
    asked = prompts(checkpoint.config.vocab_size, LENGTHS)
    with expert_servers(checkpoint, "float32", ["0/2", "1/2"]) as servers:
        entries = [entry_of(server.state, server.port) for server in servers]
        with remote(checkpoint, entries) as experts:
            runner = make_runner(folder, block_size=5, experts=experts)
            there = drive(runner, TRAFFIC, asked, NUM_TOKENS)
    here = drive(make_runner(folder, block_size=5), TRAFFIC, asked, NUM_TOKENS)
    assert bits(there) == bits(here)


def _check(folder: Path, oracle: Oracle) -> None:
    runner = make_runner(folder, block_size=TRAFFIC.block_size)
    compare(drive(runner, TRAFFIC, prompts(oracle.vocab_size, LENGTHS), NUM_TOKENS), oracle).check()
