"""Families through the real mesh: `expertmesh serve` with two expert workers, asked over HTTP.

One with latent attention and grouped gates, one with mixed windows, sinks and unequal heads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.family_folders import FamilyFolders
from tests.support.mesh import serve
from tests.support.oracle import MIN_MARGIN, prompts
from tests.support.parity import MAX_DIFFERENCE
from tests.support.tiny_families import VOCAB_SIZE

LENGTHS = (1, 12, 33, 70)
NUM_TOKENS = 30


@pytest.mark.parametrize("name", [pytest.param("kimi_k2", marks=pytest.mark.slow), "mimo_v2_flash"])
def test_the_mesh_gives_the_reference_tokens(tmp_path: Path, name: str) -> None:
    """Four prompts at once, and again, when prefixes are found: transformers' tokens."""
    folders = FamilyFolders(tmp_path)
    oracle = folders.oracle(name)
    asked = prompts(VOCAB_SIZE, LENGTHS, seed=4)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in asked]
    assert min(float(one.margins.min()) for one in expected) > MIN_MARGIN, "choose another seed"
    flags = ("--max-num-batched-tokens", "16")
    with (
        serve(folders.served(name), *flags, expert_workers=2) as server,
        ThreadPoolExecutor(len(asked), thread_name_prefix="client") as pool,
    ):
        for _ in range(2):
            answers = pool.map(lambda prompt: server.api.complete(prompt, NUM_TOKENS), asked)
            for one, answer in zip(expected, answers, strict=True):
                assert one.token_ids == answer.token_ids
                difference = np.abs(one.logprobs - np.array(answer.logprobs))
                assert difference.max() <= MAX_DIFFERENCE
