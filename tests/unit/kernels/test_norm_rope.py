"""RMS norm and rotary embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from expertmesh.model_config import RopeConfig
from expertmesh_kernels.norm import rms_norm, rms_norm_reference
from expertmesh_kernels.rope import apply_rope, apply_rope_reference, rope_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 64, 576])
def test_norm_matches_the_reference_and_is_invariant(width: int, dtype: torch.dtype) -> None:
    """Agrees with PyTorch for any width; a row alone gets the bits it gets in a batch."""
    generator = torch.Generator().manual_seed(width)
    x_TH = (torch.randn(6, width, generator=generator) * 3).to(dtype)
    weight_H = torch.randn(width, generator=generator).to(dtype)
    together = rms_norm(x_TH, weight_H, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = rms_norm_reference(x_TH, weight_H, 1e-5)
    torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)
    alone = [rms_norm(x_TH[t : t + 1], weight_H, 1e-5) for t in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_norm_checks_the_width() -> None:
    """A weight of another width raises ValueError."""
    with pytest.raises(ValueError, match=r"expected \[T, 4\]"):
        rms_norm(torch.ones(2, 3), torch.ones(4), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_matches_the_reference_in_place(dtype: torch.dtype) -> None:
    """A column slice is rotated in place; its neighbours and unrotated dimensions stay."""
    table = rope_table(RopeConfig(theta=10_000.0, dim=12), 64)
    positions = np.array([0, 63, 7, 7, 31], np.int32)
    fused = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, before = fused.clone(), fused.clone()
    apply_rope_reference(expected[:, 4:68].view(5, 4, 16), positions, table)
    apply_rope(fused[:, 4:68].view(5, 4, 16), positions, table)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(before[:, :4], fused[:, :4])
    assert torch.equal(before[:, 68:], fused[:, 68:])
    heads_before, heads = (x[:, 4:68].view(5, 4, 16) for x in (before, fused))
    assert torch.equal(heads_before[..., 12:], heads[..., 12:])


def test_rope_is_invariant() -> None:
    """A row alone gets the bits it gets in a batch."""
    table = rope_table(RopeConfig(theta=10_000.0, dim=16), 64)
    positions = np.arange(9, dtype=np.int32)
    together = torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = together.clone()
    apply_rope(together, positions, table)
    for t in range(9):
        apply_rope(alone[t : t + 1], positions[t : t + 1], table)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_tables_equal_those_of_transformers(kind: str) -> None:
    """Cosines and sines are the ones that transformers computes, bit by bit."""
    parameters = {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    }[kind]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10_000.0, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    ours = {
        "default": RopeConfig(theta=10_000.0, dim=64),
        "linear": RopeConfig(theta=10_000.0, dim=64, kind="linear", factor=4.0),
        "llama3": RopeConfig(
            theta=10_000.0,
            dim=64,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=128,
        ),
    }[kind]
    table = rope_table(ours, 512)
    torch.testing.assert_close(table.cos_LD, cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin_LD, sin[0, :, :32], rtol=0, atol=1e-6)
