"""Gated FFNs: activation, one FFN, and an expert per pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.model_config import SILU
from expertmesh_kernels.activation import gated_activation, gated_activation_reference
from expertmesh_kernels.grouped_mlp import (
    ExpertWeights,
    gated_mlp,
    gated_mlp_reference,
    grouped_mlp,
    grouped_mlp_reference,
)
from expertmesh_kernels.linear import linear, pack_linear

HIDDEN, INTERMEDIATE, EXPERTS = 72, 50, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_experts(dtype: torch.dtype) -> dict[int, ExpertWeights]:
    """Seeded experts with outputs of order one."""
    generator = torch.Generator().manual_seed(3)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    return {
        e: ExpertWeights(
            pack_linear(weight(2 * INTERMEDIATE, HIDDEN)), pack_linear(weight(HIDDEN, INTERMEDIATE))
        )
        for e in range(EXPERTS)
    }


def make_rows(rows: int, dtype: torch.dtype) -> Tensor:
    """Seeded hidden states."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_matches_the_reference(dtype: torch.dtype) -> None:
    """silu(gate) * up, also for large values of both signs."""
    gate_up = (torch.randn(7, 100, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    tolerance = TOLERANCE[dtype]
    expected = gated_activation_reference(gate_up, SILU)
    torch.testing.assert_close(
        gated_activation(gate_up, SILU), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ffn_matches_the_reference(dtype: torch.dtype) -> None:
    """The fused FFN agrees with PyTorch."""
    x_RH, expert = make_rows(9, dtype), make_experts(dtype)[0]
    expected = gated_mlp_reference(x_RH, expert, SILU)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        gated_mlp(x_RH, expert, SILU), expected, rtol=tolerance, atol=tolerance
    )


def test_one_ffn_equals_its_parts_bit_by_bit() -> None:
    """Fusion changes nothing: two linears and an activation, rounded where the contract says."""
    x_RH, expert = make_rows(20, torch.bfloat16), make_experts(torch.bfloat16)[0]
    gate_up = linear(x_RH, expert.gate_up, out_dtype=torch.float32)
    expected = linear(gated_activation(gate_up, SILU).to(torch.bfloat16), expert.down)
    assert torch.equal(expected, gated_mlp(x_RH, expert, SILU))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_match_the_reference(dtype: torch.dtype) -> None:
    """Each pair gets its expert's output of its row; unused rows may hold NaN."""
    rng = np.random.default_rng(5)
    rows, experts = rng.integers(0, 12, 30), rng.integers(0, EXPERTS, 30)
    x_RH, weights = make_rows(14, dtype), make_experts(dtype)
    x_RH[12:] = torch.nan
    expected = grouped_mlp_reference(x_RH, rows, experts, weights, SILU)
    actual = grouped_mlp(x_RH, rows, experts, weights, SILU)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_has_the_same_bits_alone_and_in_any_call(dtype: torch.dtype) -> None:
    """Order and company of pairs, and NaN in other rows, leave a result as it is."""
    rng = np.random.default_rng(6)
    rows, experts = rng.integers(0, 12, 60), rng.integers(0, EXPERTS, 60)
    x_RH, weights = make_rows(13, dtype), make_experts(dtype)
    together = grouped_mlp(x_RH, rows, experts, weights, SILU)
    order = rng.permutation(60)
    shuffled = grouped_mlp(x_RH, rows[order], experts[order], weights, SILU)
    alone = [
        gated_mlp(x_RH[r : r + 1], weights[e], SILU) for r, e in zip(rows, experts, strict=True)
    ]
    assert torch.equal(together[torch.from_numpy(order)], shuffled)
    assert torch.equal(together, torch.cat(alone))
    x_RH[12] = torch.nan
    with_nan = grouped_mlp(x_RH, np.append(rows, 12), np.append(experts, experts[0]), weights, SILU)
    assert torch.equal(together, with_nan[:60])


def test_no_pairs_give_no_rows() -> None:
    """An empty list of pairs is answered with an empty result."""
    nothing = np.empty(0, np.int64)
    out = grouped_mlp(make_rows(2, torch.float32), nothing, nothing, {}, SILU)
    assert tuple(out.shape) == (0, HIDDEN)


def test_read_only_indices_are_accepted() -> None:
    """Arrays straight from a message, which can't be written, are fine."""
    rows, experts = np.array([1, 0]), np.array([0, 1])
    rows.flags.writeable = experts.flags.writeable = False
    x_RH, weights = make_rows(2, torch.float32), make_experts(torch.float32)
    expected = torch.cat(
        [gated_mlp(x_RH[1:], weights[0], SILU), gated_mlp(x_RH[:1], weights[1], SILU)]
    )
    assert torch.equal(expected, grouped_mlp(x_RH, rows, experts, weights, SILU))


def test_wrong_width_and_unknown_expert_raise() -> None:
    """Rows of another model's width raise ValueError, an absent expert KeyError."""
    weights = make_experts(torch.float32)
    with pytest.raises(ValueError, match=f"x has 3 features, expected {HIDDEN}"):
        gated_mlp(torch.ones(1, 3), weights[0], SILU)
    with pytest.raises(KeyError):
        grouped_mlp(make_rows(1, torch.float32), np.array([0]), np.array([99]), weights, SILU)
