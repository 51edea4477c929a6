"""Linear layers in Triton: against the reference, with NaN around, and their invariance."""

from __future__ import annotations

import pytest
import torch

from expertmesh_kernels.heads import head_linear_reference, pack_heads
from expertmesh_kernels.linear import linear_reference, pack_linear
from expertmesh_kernels.triton.linear import head_linear, linear
from tests.support.blas import needs_bits_of_rows
from tests.support.poison import poisoned
from tests.unit.kernels.triton.test_small import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 3, 5), (9, 64, 33), (40, 130, 65)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    dtype: torch.dtype, rows: int, depth: int, columns: int, device: torch.device
) -> None:
    """Odd shapes with a bias, few rows and many."""
    x_RK, weight_NK = random(rows, depth).to(dtype), random(columns, depth, seed=1).to(dtype)
    bias_N = random(columns, seed=2).to(dtype)
    packed = pack_linear(weight_NK, bias_N)
    weight_KN = poisoned(weight_NK.T.reshape(-1).to(device)).view(depth, columns)
    actual = linear(poisoned(x_RK.to(device)), weight_KN, bias_N.to(device))
    tolerance = TOLERANCE[dtype] * depth**0.5
    expected = linear_reference(x_RK, packed)
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@needs_bits_of_rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Below and above the height at which tiles change; neighbours of NaN do not matter."""
    x_RK = random(70, 100).to(device, dtype)
    weight_KN = random(100, 48, seed=1).to(device, dtype)
    together = linear(x_RK, weight_KN)
    for rows in ([7], [69, 0], list(range(60, 70)), list(range(30, 70))):
        assert torch.equal(linear(x_RK[rows], weight_KN), together[rows])
    x_RK[::2] = torch.nan
    assert torch.equal(linear(x_RK, weight_KN)[1::2], together[1::2])


def test_mixed_dtypes_are_multiplied_in_fp32(device: torch.device) -> None:
    """Rows in bfloat16 and a weight in FP32, as gates have it: no weight is rounded."""
    x_RK, weight_KN = random(5, 40).bfloat16(), random(40, 20, seed=1)
    actual = linear(x_RK.to(device), weight_KN.to(device), out_dtype=torch.float32)
    torch.testing.assert_close(actual.cpu(), x_RK.float() @ weight_KN, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_its_weight(dtype: torch.dtype, device: torch.device) -> None:
    """Heads that are a slice of a larger tensor."""
    x_TnK, weight_nNK = random(5, 3, 24).to(dtype), random(3, 40, 24, seed=1).to(dtype)
    weight_nKN = weight_nNK.transpose(1, 2).contiguous().to(device)
    actual = head_linear(poisoned(x_TnK.to(device)), weight_nKN)
    expected = head_linear_reference(x_TnK, pack_heads(weight_nNK))
    tolerance = TOLERANCE[dtype] * 5
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_no_rows_give_no_rows(device: torch.device) -> None:
    """No kernel is launched with an empty grid."""
    result = linear(torch.empty(0, 16, device=device), torch.ones(16, 4, device=device))
    assert result.shape == (0, 4)
