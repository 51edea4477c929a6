"""The packed linear layer: its canonical chain, bit by bit, and its independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.linear import linear, linear_reference, pack_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fma_f32(
    x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]
) -> NDArray[np.float32]:
    """x * y + z with one rounding: exact in float64 but for the sum, which is rounded to odd."""
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def canonical_chain(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """acc = fma(x[k], w[k], acc) for ascending k from 0, in FP32."""
    x, weight = x_RK.float().numpy(), weight_NK.float().numpy()
    acc_RN = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for k in range(x.shape[1]):
        acc_RN = fma_f32(x[:, k, None], weight[None, :, k], acc_RN)
    return torch.from_numpy(acc_RN)


def random_case(
    rows: int, depth: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded rows, weight and bias."""
    generator = torch.Generator().manual_seed(rows * 7919 + depth * 31 + columns)
    x_RK = torch.randn(rows, depth, generator=generator).to(dtype)
    weight_NK = torch.randn(columns, depth, generator=generator).to(dtype)
    return x_RK, weight_NK, torch.randn(columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", range(1, 41))
def test_equals_the_canonical_chain_bit_by_bit(rows: int, dtype: torch.dtype) -> None:
    """Every output is one FP32 chain in ascending k, whatever the number of rows."""
    x_RK, weight_NK, _ = random_case(rows, 37, 77, dtype)
    packed = pack_linear(weight_NK, format="panels")
    actual = linear(x_RK, packed, out_dtype=torch.float32)
    expected = canonical_chain(x_RK, weight_NK)
    assert torch.equal(expected, actual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (3, 64), (65, 130), (576, 193)])
def test_matches_the_reference(depth: int, columns: int, dtype: torch.dtype) -> None:
    """The kernel agrees with PyTorch for odd shapes, with a bias, in the dtype of x."""
    x_RK, weight_NK, bias_N = random_case(9, depth, columns, dtype)
    packed = pack_linear(weight_NK, bias_N)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    expected = linear_reference(x_RK, packed)
    torch.testing.assert_close(linear(x_RK, packed), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """Batch size, position and neighbours, NaN included, leave a row's result as it is."""
    x_RK, weight_NK, bias_N = random_case(40, 100, 150, dtype)
    packed = pack_linear(weight_NK, bias_N)
    together = linear(x_RK, packed)
    alone = torch.cat([linear(x_RK[r : r + 1], packed) for r in range(40)])
    poisoned = x_RK.clone()
    poisoned[::2] = torch.nan
    assert torch.equal(alone, together)
    assert torch.equal(together[1::2], linear(poisoned, packed)[1::2])


def test_a_column_has_the_same_bits_in_any_matrix() -> None:
    """Splitting the output features over several weights changes nothing."""
    x_RK, weight_NK, _ = random_case(5, 50, 200, torch.bfloat16)
    whole = linear(x_RK, pack_linear(weight_NK))
    parts = [linear(x_RK, pack_linear(part)) for part in weight_NK.split([70, 1, 129])]
    assert torch.equal(whole, torch.cat(parts, dim=1))


def test_rounds_once_to_the_requested_dtype() -> None:
    """A bfloat16 result is the FP32 result rounded by PyTorch, NaN and infinity included."""
    x_RK, weight_NK, _ = random_case(8, 64, 64, torch.bfloat16)
    x_RK[0, 0], x_RK[1, 1] = torch.nan, torch.inf
    packed = pack_linear(weight_NK)
    wide = linear(x_RK, packed, out_dtype=torch.float32)
    for dtype in DTYPES:
        narrow = linear(x_RK, packed, out_dtype=dtype)
        assert dtype == narrow.dtype
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_zero_rows_give_zero_rows() -> None:
    """An empty batch is answered with an empty result."""
    packed = pack_linear(torch.ones(5, 3))
    assert tuple(linear(torch.empty(0, 3), packed).shape) == (0, 5)


def test_packing_keeps_the_weight_and_reports_its_size() -> None:
    """The K-major view is the transposed weight; sizes are those of the matrix."""
    weight_NK = random_case(1, 6, 70, torch.float32)[1]
    packed = pack_linear(weight_NK)
    assert torch.equal(weight_NK.t(), packed.weight_KN)
    assert (packed.in_features, packed.out_features) == (6, 70)
    assert packed.nbytes == 6 * 128 * 4


def test_wrong_shapes_are_named() -> None:
    """Shapes that don't fit raise ValueError with both numbers."""
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(2,\)"):
        pack_linear(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        pack_linear(torch.ones(4))
    with pytest.raises(ValueError, match="x has 5 features, expected 4"):
        linear(torch.ones(1, 5), pack_linear(torch.ones(2, 4)))
