"""Norms, rope, combine and activations in Triton: against the references, and their invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.model_config import GELU_TANH, SILU, Activation, RopeConfig
from expertmesh_kernels.activation import gated_activation_reference, sigmoid_scaled_reference
from expertmesh_kernels.combine import combine_reference
from expertmesh_kernels.norm import rms_norm_reference
from expertmesh_kernels.rope import apply_rope_reference, rope_table
from expertmesh_kernels.triton.activation import gated_activation, sigmoid_scaled
from expertmesh_kernels.triton.combine import combine
from expertmesh_kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_parts_
from expertmesh_kernels.triton.rope import apply_rope
from tests.support.poison import is_still_poisoned, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ACTIVATIONS = [SILU, GELU_TANH, Activation("clamped_swiglu", alpha=1.7, limit=3.0)]


def random(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Seeded values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for a rounding."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_matches_the_reference(
    dtype: torch.dtype, round_first: bool, device: torch.device
) -> None:
    """Rows of a slice with NaN around; a row alone has the same bits."""
    x_TH, weight_H = random(6, 100, size=3).to(dtype), random(100, seed=1)
    x = poisoned(x_TH.to(device))
    actual = rms_norm(x, weight_H.to(device), 1e-5, round_first=round_first)
    close(actual, rms_norm_reference(x_TH, weight_H, 1e-5, round_first=round_first))
    alone = [
        rms_norm(x[t : t + 1], weight_H.to(device), 1e-5, round_first=round_first) for t in (4, 1)
    ]
    assert torch.equal(actual[[4, 1]], torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum(dtype: torch.dtype, device: torch.device) -> None:
    """The sum is rounded once, kept, and normalised."""
    x_TH, y_TH, weight_H = random(3, 72).to(dtype), random(3, 72, seed=1).to(dtype), random(72)
    expected_TH = (x_TH.float() + y_TH.float()).to(dtype)
    sum_TH, actual_TH = add_rms_norm(x_TH.to(device), y_TH.to(device), weight_H.to(device), 1e-5)
    assert torch.equal(sum_TH.cpu(), expected_TH)
    close(actual_TH, rms_norm_reference(expected_TH, weight_H, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_is_in_place_and_touches_nothing_else(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Heads that are a slice of a larger tensor."""
    x_TnD, weight_D = random(4, 3, 24).to(dtype), random(24, seed=1)
    x = poisoned(x_TnD.to(device))
    rms_norm_parts_(x, weight_D.to(device), 1e-6)
    close(x, rms_norm_reference(x_TnD, weight_D, 1e-6))
    assert is_still_poisoned(x)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_matches_the_reference(
    dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    """Part of each head of a slice, positions in any order; the rest stays as it is."""
    rope = RopeConfig(theta=1e4, dim=12, kind="linear", factor=2.0, interleaved=interleaved)
    table = rope_table(rope, 50)
    expected, positions_T = random(5, 5, 20).to(dtype), np.array([49, 0, 7, 7, 1], np.int32)
    x = poisoned(expected.to(device))
    apply_rope_reference(expected, positions_T, table)
    apply_rope(
        x, torch.from_numpy(positions_T).to(device), table.cos_LD.to(device),
        table.sin_LD.to(device), interleaved=interleaved,
    )  # fmt: skip
    close(x, expected)
    assert is_still_poisoned(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_matches_the_reference_and_is_invariant(
    dtype: torch.dtype, device: torch.device
) -> None:
    """An odd width; a token alone has the same bits."""
    outputs_SH, weights_TK = random(12, 77).to(dtype), random(4, 3, seed=1).abs()
    actual = combine(outputs_SH.to(device), weights_TK.to(device))
    close(actual, combine_reference(outputs_SH, weights_TK.numpy()))
    alone = combine(outputs_SH[6:9].to(device), weights_TK[2:3].to(device))
    assert torch.equal(actual[2:3], alone)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_matches_the_reference(
    dtype: torch.dtype, activation: Activation, device: torch.device
) -> None:
    """Also for large values of both signs."""
    gate_up_R2I = random(4, 90, size=4)
    gate_up_R2I[0, :4] = torch.tensor([0.0, 1e4, -1e4, 3.0])
    gate_up_R2I = gate_up_R2I.to(dtype)
    actual = gated_activation(poisoned(gate_up_R2I.to(device)), activation)
    close(actual, gated_activation_reference(gate_up_R2I, activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_scaled_matches_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """Saturated logits too."""
    x_RH, logits_R1 = random(5, 40).to(dtype), torch.tensor([[-200.0], [-3], [0], [3], [200]])
    actual = sigmoid_scaled(poisoned(x_RH.to(device)), logits_R1.to(device))
    close(actual, sigmoid_scaled_reference(x_RH, logits_R1))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    """No kernel is launched with an empty grid."""
    x, weights = torch.empty(0, 16, device=device), torch.empty(0, 2, device=device)
    assert rms_norm(x, torch.ones(16, device=device), 1e-5).shape == (0, 16)
    assert combine(x, weights).shape == (0, 16)
    assert gated_activation(x, SILU).shape == (0, 8)
