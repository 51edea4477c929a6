"""One linear layer per head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertmesh_kernels.heads import head_linear, head_linear_reference, pack_heads
from expertmesh_kernels.linear import linear, pack_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HEADS, IN, OUT = 5, 24, 70


def make_inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Seeded rows and weights."""
    generator = torch.Generator().manual_seed(7)
    weight_nNK = torch.randn(HEADS, OUT, IN, generator=generator) / IN**0.5
    return torch.randn(rows, HEADS, IN, generator=generator).to(dtype), weight_nNK.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 6, 20])
def test_matches_the_reference(rows: int, dtype: torch.dtype) -> None:
    """From no rows to so many that the weights are converted first."""
    x_TnK, weight_nNK = make_inputs(rows, dtype)
    packed = pack_heads(weight_nNK)
    expected = head_linear_reference(x_TnK, packed)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(head_linear(x_TnK, packed), expected, rtol=limit, atol=limit)
    by_hand = torch.einsum("tnk,nok->tno", x_TnK.float(), weight_nNK.float()).to(dtype)
    torch.testing.assert_close(expected, by_hand, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_a_row_has_the_bits_of_a_linear_layer(dtype: torch.dtype) -> None:
    """Alone, in a batch and reversed; the chains are those of `linear`."""
    x_TnK, weight_nNK = make_inputs(20, dtype)
    packed = pack_heads(weight_nNK)
    together = head_linear(x_TnK, packed)
    alone = [head_linear(x_TnK[t : t + 1], packed) for t in range(20)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together.flip(0), head_linear(x_TnK.flip(0), packed))
    for head in range(HEADS):
        expected = linear(x_TnK[:, head], pack_linear(weight_nNK[head]))
        assert torch.equal(together[:, head], expected)


def test_leading_part_of_each_head_is_taken_in_place() -> None:
    """The input may be a part of wider heads, with NaN beside it."""
    x_TnK, weight_nNK = make_inputs(3, torch.bfloat16)
    wide = torch.full((3, HEADS, IN + 9), torch.nan, dtype=torch.bfloat16)
    wide[..., :IN] = x_TnK
    packed = pack_heads(weight_nNK)
    assert torch.equal(head_linear(wide[..., :IN], packed), head_linear(x_TnK, packed))


def test_wrong_shapes_are_named() -> None:
    """Inputs of another width, weights of another rank."""
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 3\), expected \[T, 5, 24\]"):
        head_linear(torch.zeros(2, 5, 3), pack_heads(make_inputs(1, torch.float32)[1]))
    with pytest.raises(ValueError, match=r"expected \[heads, out, in\]"):
        pack_heads(torch.zeros(2, 3))
