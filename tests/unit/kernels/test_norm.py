"""RMS norm of rows, of heads and of all heads of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from expertmesh_kernels.norm import add_rms_norm, rms_norm, rms_norm_heads_, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make_rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Seeded rows, and a weight for the last dimension that `dtype` can hold."""
    generator = torch.Generator().manual_seed(shape[-1])
    x = (torch.randn(*shape, generator=generator) * 3).to(dtype)
    return x, torch.randn(shape[-1], generator=generator).to(dtype).float()


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 64, 576])
def test_norm_matches_the_reference_and_is_invariant(
    width: int, dtype: torch.dtype, round_first: bool
) -> None:
    """Agrees with PyTorch for any width; a row alone gets the bits it gets in a batch."""
    x_TH, weight_H = make_rows((6, width), dtype)
    together = rms_norm(x_TH, weight_H, 1e-5, round_first=round_first)
    expected = rms_norm_reference(x_TH, weight_H, 1e-5, round_first=round_first)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(together, expected, rtol=limit, atol=limit)
    rows = range(5, -1, -1)
    alone = [rms_norm(x_TH[t : t + 1], weight_H, 1e-5, round_first=round_first) for t in rows]
    assert torch.equal(together.flip(0), torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_roundings_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Llama rounds before the product with the weight, Gemma after it alone."""
    x_TH, weight_H = make_rows((40, 64), dtype)
    llama, gemma = LlamaRMSNorm(64, 1e-6).to(dtype), Gemma2RMSNorm(64, 1e-6)
    llama.weight.data[:] = weight_H
    gemma.weight.data[:] = weight_H - 1
    rounded = rms_norm(x_TH, weight_H, 1e-6, round_first=True)
    unrounded = rms_norm(x_TH, 1 + (weight_H - 1), 1e-6, round_first=False)
    for actual, expected in ((rounded, llama(x_TH)), (unrounded, gemma(x_TH))):
        is_equal = torch.isclose(actual, expected, rtol=1e-6, atol=1e-6)
        assert int(is_equal.sum()) > 0.995 * actual.numel()
    if dtype != torch.float32:
        assert not torch.equal(rounded, unrounded)


def test_norm_keeps_a_weight_that_the_dtype_cannot_hold() -> None:
    """The weight is used in FP32: it is not rounded to the rows' dtype."""
    x_TH, _ = make_rows((10, 64), torch.bfloat16)
    weight_H = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1
    wide = rms_norm(x_TH.float(), weight_H, 1e-5)
    kept = rms_norm(x_TH, weight_H, 1e-5, round_first=False)
    assert torch.equal(kept, wide.bfloat16())
    rounded = rms_norm(x_TH, weight_H.bfloat16().float(), 1e-5, round_first=False)
    assert not torch.equal(kept, rounded)


def test_norm_of_a_column_slice() -> None:
    """A slice of wider rows gives the same."""
    x_TH, weight_H = make_rows((4, 24), torch.bfloat16)
    expected = rms_norm(x_TH[:, 4:20].contiguous(), weight_H[:16], 1e-5)
    assert torch.equal(expected, rms_norm(x_TH[:, 4:20], weight_H[:16], 1e-5))


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [True, False])
def test_heads_are_normalised_in_place(whole: bool, dtype: torch.dtype, round_first: bool) -> None:
    """The bits are those of `rms_norm`; what lies beside the slice stays, NaN or not."""
    fused, weight = make_rows((5, 60), dtype)
    fused[:, 52:] = torch.nan
    before = fused.clone()
    heads_TnD = fused[:, 4:52].view(5, 3, 16)
    own = weight[:48] if whole else weight[:16]
    rows = before[:, 4:52].reshape(5 if whole else 15, -1)
    expected = rms_norm(rows, own, 1e-5, round_first=round_first).view(5, 3, 16)
    rms_norm_heads_(heads_TnD, own, 1e-5, whole=whole, round_first=round_first)
    assert torch.equal(heads_TnD, expected)
    assert torch.equal(fused[:, :4], before[:, :4])
    assert bool(fused[:, 52:].isnan().all())


def test_part_of_each_head_is_normalised() -> None:
    """The leading 10 of 16 dimensions of each head, for instance."""
    x_TnD, weight = make_rows((5, 3, 16), torch.float32)
    expected = x_TnD.clone()
    expected[..., :10] = rms_norm_reference(x_TnD[..., :10], weight[:10], 1e-5)
    rms_norm_heads_(x_TnD[..., :10], weight[:10], 1e-5, whole=False)
    torch.testing.assert_close(x_TnD, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="expected contiguous rows"):
        rms_norm_heads_(x_TnD[..., :10], weight.repeat(2)[:30], 1e-5, whole=True)


def test_norm_checks_the_width() -> None:
    """A weight of another width raises ValueError."""
    with pytest.raises(ValueError, match=r"expected \[T, 4\]"):
        rms_norm(torch.ones(2, 3), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), expected \(6,\)"):
        rms_norm_heads_(torch.ones(2, 3, 2), torch.ones(4), 1e-5, whole=True)


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33, 100])
def test_the_fused_residual_norm_equals_its_parts_bit_by_bit(
    rows: int, dtype: torch.dtype, round_first: bool
) -> None:
    """The sum is PyTorch's, the norm is `rms_norm` of it; strided inputs are fine."""
    x_TH, weight_H = make_rows((rows, 70), dtype)
    y_TH = make_rows((rows, 71), dtype)[0][:, 1:]
    sum_TH, norm_TH = add_rms_norm(x_TH, y_TH, weight_H, 1e-5, round_first=round_first)
    assert torch.equal(sum_TH, x_TH + y_TH)
    expected = rms_norm(x_TH + y_TH, weight_H, 1e-5, round_first=round_first)
    assert torch.equal(norm_TH, expected)


def test_addends_of_different_shapes_are_named() -> None:
    """Nothing is broadcast or converted."""
    x_TH, weight_H = make_rows((3, 8), torch.float32)
    for wrong in (x_TH[:2], x_TH[:, :7], x_TH.bfloat16()):
        with pytest.raises(ValueError, match=r"x is torch.float32 \(3, 8\) and y"):
            add_rms_norm(x_TH, wrong, weight_H, 1e-5)
