"""Rotary embedding: tables against transformers, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from expertmesh.model_config import RopeConfig
from expertmesh_kernels.rope import apply_rope, apply_rope_reference, rope_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
PLAIN = RopeConfig(theta=10_000.0, dim=12)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_matches_the_reference_in_place(dtype: torch.dtype, interleaved: bool) -> None:
    """A column slice is rotated in place; its neighbours and unrotated dimensions stay."""
    table = rope_table(replace(PLAIN, interleaved=interleaved), 64)
    positions = np.array([0, 63, 7, 7, 31], np.int32)
    fused = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, before = fused.clone(), fused.clone()
    apply_rope_reference(expected[:, 4:68].view(5, 4, 16), positions, table)
    apply_rope(fused[:, 4:68].view(5, 4, 16), positions, table)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(fused, expected, rtol=limit, atol=limit)
    assert torch.equal(before[:, :4], fused[:, :4])
    assert torch.equal(before[:, 68:], fused[:, 68:])
    heads_before, heads = (x[:, 4:68].view(5, 4, 16) for x in (before, fused))
    assert torch.equal(heads_before[..., 12:], heads[..., 12:])
    assert not torch.equal(heads_before[1:, :, :12], heads[1:, :, :12])


def test_last_part_of_each_head_is_rotated() -> None:
    """The part with rope may come after one without, which stays."""
    table = rope_table(replace(PLAIN, interleaved=True), 8)
    positions = np.array([3, 5], np.int32)
    x_TnD = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, part = x_TnD.clone(), x_TnD[..., 8:].contiguous()
    apply_rope(part, positions, table)
    apply_rope(x_TnD[..., 8:], positions, table)
    assert torch.equal(x_TnD[..., 8:], part)
    assert torch.equal(x_TnD[..., :8], before[..., :8])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_invariant(dtype: torch.dtype, interleaved: bool) -> None:
    """A row alone gets the bits it gets in a batch."""
    table = rope_table(replace(PLAIN, interleaved=interleaved), 64)
    positions = np.arange(9, dtype=np.int32)
    together = torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = together.clone()
    apply_rope(together, positions, table)
    for t in range(8, -1, -1):
        apply_rope(alone[t : t + 1], positions[t : t + 1], table)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_tables_equal_those_of_transformers(kind: str) -> None:
    """Cosines and sines are the ones that transformers computes."""
    parameters = {"default": {}, "linear": {"factor": 4.0}, "llama3": LLAMA3}[kind]
    rope = {"rope_theta": 10_000.0, "rope_type": kind, **parameters}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )
    plain = RopeConfig(theta=10_000.0, dim=64)
    ours = {
        "default": plain,
        "linear": replace(plain, kind="linear", factor=4.0),
        "llama3": replace(
            plain, kind="llama3", factor=8.0, high_freq_factor=4.0, original_max_position=128
        ),
    }[kind]
    _check_table(ours, LlamaRotaryEmbedding(config))


def _check_table(
    ours: RopeConfig, theirs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """All angles of 512 positions; theirs may have each twice."""
    table, half = rope_table(ours, 512), ours.dim // 2
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    torch.testing.assert_close(table.cos_LD, cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin_LD, sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("theta", "dim", "original", "factor", "betas"),
    [
        (10_000.0, 64, 4096, 40.0, (32.0, 1.0)),
        (150_000.0, 64, 4096, 32.0, (32.0, 1.0)),
        (10_000.0, 8, 64, 4.0, (32.0, 1.0)),
        (1e6, 128, 32_768, 4.0, (16.0, 2.0)),
        (10_000.0, 64, 4096, 40.0, (1.0, 1.0)),
        (100.0, 4, 16, 2.0, (32.0, 1.0)),
    ],
)
def test_yarn_equals_that_of_transformers(
    theta: float, dim: int, original: int, factor: float, betas: tuple[float, float], truncate: bool
) -> None:
    """Cosines and sines of YaRN, with ends of the ramp rounded or not, also without a ramp."""
    rope: dict[str, float | str | bool] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "truncate": truncate,
    }
    config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, rope_parameters=rope)
    frequencies_D, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    ours = RopeConfig(
        theta=theta,
        dim=dim,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
        attention_factor=attention_factor,
    )
    assert attention_factor > 1
    angles_LD = torch.arange(512).float()[:, None] * frequencies_D
    table = rope_table(ours, 512)
    torch.testing.assert_close(table.cos_LD, angles_LD.cos() * attention_factor, rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin_LD, angles_LD.sin() * attention_factor, rtol=0, atol=1e-6)


def test_tables_of_gpt_oss() -> None:
    """YaRN without rounding, as its configuration has it by default."""
    config = GptOssConfig()
    rope = config.rope_parameters
    ours = RopeConfig(
        theta=rope["rope_theta"],
        dim=config.head_dim,
        kind="yarn",
        factor=rope["factor"],
        original_max_position=rope["original_max_position_embeddings"],
        beta_fast=rope["beta_fast"],
        beta_slow=rope["beta_slow"],
        truncate=rope["truncate"],
        attention_factor=0.1 * math.log(rope["factor"]) + 1,
    )
    assert not ours.truncate
    _check_table(ours, GptOssRotaryEmbedding(config))


def test_tables_and_pairs_of_deepseek() -> None:
    """V3 puts first and second halves of pairs together, which no score can tell; V2 does not."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
    }
    config = DeepseekV3Config(
        qk_rope_head_dim=16, max_position_embeddings=512, rope_parameters=rope
    )
    mscales = [0.1 * mscale * math.log(40) + 1 for mscale in (1.0, 0.707)]
    ours = RopeConfig(
        theta=10_000.0,
        dim=16,
        kind="yarn",
        factor=40.0,
        original_max_position=64,
        interleaved=True,
        attention_factor=mscales[0] / mscales[1],
    )
    embedding = DeepseekV3RotaryEmbedding(config)
    _check_table(ours, embedding)
    x_TnD = torch.randn(20, 3, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = embedding(x_TnD, torch.arange(20)[None])
    v3_TnD, _ = apply_rotary_pos_emb_interleave(x_TnD[None], x_TnD[None], cos, sin, None, 2)
    turns = torch.complex(cos[..., :8], sin[..., :8])
    v2_nTD, _ = apply_rotary_emb(x_TnD.transpose(0, 1)[None], x_TnD.transpose(0, 1)[None], turns)
    apply_rope(x_TnD, np.arange(20, dtype=np.int32), rope_table(ours, 32))
    pairs = torch.cat([x_TnD[..., 0::2], x_TnD[..., 1::2]], -1)
    torch.testing.assert_close(pairs, v3_TnD[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x_TnD, v2_nTD[0].transpose(0, 1), rtol=1e-5, atol=1e-6)
