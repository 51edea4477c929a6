"""Meshes whose experts are quantised in memory: layouts agree, and mixed pools are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertmesh.model_tools.quantize import quantize_model
from tests.conftest import Models
from tests.support.mesh import serve
from tests.support.oracle import prompts
from tests.support.quantized_folders import compressed
from tests.support.tiny_checkpoints import MIXTRAL

SHAPE = replace(MIXTRAL, hidden_size=64, num_heads=4, intermediate_size=96)


@pytest.mark.parametrize(
    "stored",
    [pytest.param(True, id="as stored"), pytest.param(False, id="on load", marks=pytest.mark.slow)],
)
def test_layouts_agree_to_the_last_bit(models: Models, tmp_path: Path, stored: bool) -> None:
    """int8 experts in the attention worker and in two expert workers: same tokens, same logprobs.

    Plain experts give others, so the setting does something.
    """
    folder, flags = models.tiny(SHAPE), ("--expert-dtype", "int8")
    if stored:
        int8 = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
        quantize_model(folder, tmp_path / "model", int8)
        folder, flags = tmp_path / "model", ()
    answers = []
    for workers, given in ((0, flags), (2, flags), (0, ("--expert-dtype", "plain"))):
        with serve(folder, *given, expert_workers=workers, dtype="bfloat16") as server:
            asked = prompts(SHAPE.vocab_size, (5, 20))
            answers.append(
                [server.api.complete(prompt, 12, temperature=0, logprobs=1) for prompt in asked]
            )
    assert answers[0] == answers[1] != answers[2]
