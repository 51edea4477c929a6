"""Rows as int8 with a scale each: bounds, special rows, invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expertmesh_kernels.row_quant import dequantize_rows, quantize_reference, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(
    x_TH: torch.Tensor, rows: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Elements, scales, broken rows, and whether there are none; memory poisoned before."""
    q_RH = np.full((len(rows), x_TH.shape[1]), 99, np.int8)
    scales_R = np.full(len(rows), np.nan, np.float32)
    broken_T = np.zeros(len(x_TH), np.bool_)
    all_finite = quantize_rows(x_TH, np.array(rows), q_RH, scales_R, broken_T)
    return q_RH, scales_R, broken_T, all_finite


def rows_of(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes_T1 = torch.logspace(-4, 3, num_rows)[:, None]
    return (torch.randn(num_rows, 33, generator=generator) * sizes_T1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_half_a_scale(dtype: torch.dtype) -> None:
    """There and back, an element is off by half a scale and its rounding; as in PyTorch."""
    x_TH = rows_of(9, dtype)
    rows = [8, 0, 3, 4]
    q_RH, scales_R, broken_T, all_finite = quantized(x_TH, rows)
    assert all_finite
    assert not broken_T.any()
    expected, scales = quantize_reference(x_TH[rows])
    assert torch.equal(torch.from_numpy(scales_R), scales)
    assert (torch.from_numpy(q_RH).int() - expected.int()).abs().max() <= 0
    back_RH = torch.full((4, 33), torch.nan, dtype=dtype)
    assert dequantize_rows(q_RH, scales_R, back_RH) == -1
    wide = x_TH[rows].float()
    eps = torch.finfo(dtype).eps
    bound = 0.5001 * scales[:, None] + eps * wide.abs() + torch.finfo(dtype).tiny
    assert ((back_RH.float() - wide).abs() <= bound).all()
    assert np.abs(q_RH).max(axis=1).tolist() == [127] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows(dtype: torch.dtype) -> None:
    """Zeros stay zeros; a row that is not finite becomes zeros and is marked, others are not."""
    x_TH = rows_of(6, dtype)
    x_TH[1] = 0
    x_TH[2, 5], x_TH[3, 0], x_TH[4, 32] = torch.nan, torch.inf, -torch.inf
    q_RH, scales_R, broken_T, all_finite = quantized(x_TH, [0, 1, 2, 3, 4, 5])
    assert not all_finite
    assert broken_T.tolist() == [False, False, True, True, True, False]
    assert not q_RH[1:5].any()
    assert scales_R[1:5].tolist() == [0.0] * 4
    alone, alone_scales, _, _ = quantized(x_TH[5:], [0])
    assert alone.tolist() == q_RH[5:].tolist()
    assert alone_scales[0] == scales_R[5]


def test_smallest_and_largest_numbers() -> None:
    """Subnormal rows become zeros, and the largest numbers do not overflow."""
    x_TH = torch.tensor([[1e-40, -1e-41], [3.4e38, -1.0]])
    q_RH, scales_R, _, all_finite = quantized(x_TH, [0, 1])
    assert all_finite
    assert q_RH.tolist() == [[0, 0], [127, 0]]
    back_RH = torch.empty(2, 2)
    assert dequantize_rows(q_RH, scales_R, back_RH) == -1
    assert back_RH[0].tolist() == [0, 0]
    torch.testing.assert_close(back_RH[1, 0], x_TH[1, 0])


def test_scale_that_is_too_large_for_the_type() -> None:
    """The first such row is named."""
    q_RH, scales_R = np.full((3, 2), 100, np.int8), np.array([1, 1e5, 1e30], np.float32)
    assert dequantize_rows(q_RH, scales_R, torch.empty(3, 2, dtype=torch.float16)) == 1
    assert dequantize_rows(q_RH, scales_R, torch.empty(3, 2)) == -1
