"""Gated FFNs: activation, one FFN, and an expert per pair."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from expertmesh.model_config import GELU_TANH, SILU, Activation
from expertmesh_kernels.activation import (
    gated_activation,
    gated_activation_reference,
    sigmoid_scaled,
    sigmoid_scaled_reference,
)
from expertmesh_kernels.combine import combine
from expertmesh_kernels.grouped_mlp import (
    ExpertTable,
    combined_mlp,
    gated_mlp,
    gated_mlp_reference,
    grouped_mlp,
    grouped_mlp_reference,
    pack_expert,
)
from expertmesh_kernels.linear import linear, pack_linear
from expertmesh_kernels.router import Routing

HIDDEN, INTERMEDIATE, EXPERTS = 72, 50, 5
ACTIVATIONS = [SILU, GELU_TANH, Activation("clamped_swiglu", alpha=1.7, limit=3.0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_experts(dtype: torch.dtype, *, bias: bool = False) -> ExpertTable:
    """Seeded experts with outputs of order one."""
    generator = torch.Generator().manual_seed(3)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    def bias_of(rows: int) -> Tensor | None:
        return torch.randn(rows, generator=generator).to(dtype) if bias else None

    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    return ExpertTable(
        {
            e: pack_expert(*(weight(*shape) for shape in shapes), *(bias_of(r) for r, _ in shapes))
            for e in range(EXPERTS)
        }
    )


def make_rows(rows: int, dtype: torch.dtype) -> Tensor:
    """Seeded hidden states."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_matches_the_reference(dtype: torch.dtype, activation: Activation) -> None:
    """Also for large values of both signs, and for small ones."""
    for size in (30, 1, 1e-3):
        gate_up = torch.randn(7, 100, generator=torch.Generator().manual_seed(1)) * size
        gate_up[0, :4] = torch.tensor([0.0, 1e4, -1e4, 7.0])
        gate_up = gate_up.to(dtype)
        expected = gated_activation_reference(gate_up, activation)
        actual = gated_activation(gate_up, activation)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=1e-5 * size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_matches_the_reference_and_is_invariant(dtype: torch.dtype) -> None:
    """Saturated logits too; a row of a slice alone gets the bits it gets in a batch."""
    x_RH = make_rows(9, dtype)[:, 3:]
    logits_R1 = torch.tensor([[-200.0, -20, -3, -0.1, 0, 0.1, 3, 20, 200]]).T
    together = sigmoid_scaled(x_RH, logits_R1)
    expected = sigmoid_scaled_reference(x_RH, logits_R1)
    torch.testing.assert_close(together, expected, rtol=TOLERANCE[dtype], atol=1e-6)
    alone = [sigmoid_scaled(x_RH[r : r + 1], logits_R1[r : r + 1]) for r in range(8, -1, -1)]
    assert torch.equal(together.flip(0), torch.cat(alone))
    with pytest.raises(
        ValueError, match=r"logits are torch.float32 \(9, 1\), expected .* \[3, 1\]"
    ):
        sigmoid_scaled(x_RH[:3], logits_R1)


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    """Against the experts' own function in transformers, whose gates and ups alternate."""
    gate_up = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)) * 8
    owner = SimpleNamespace(limit=7.0, alpha=1.702)
    expected = GptOssExperts._apply_gate(owner, gate_up)
    ours = gated_activation(
        torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1),
        Activation("clamped_swiglu", alpha=1.702, limit=7.0),
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert int((gate_up.abs() > 7).sum()) > 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_by_the_sigmoid_of_their_logits(dtype: torch.dtype) -> None:
    """Also where it is 0 or 1; no row depends on the others; other shapes are refused."""
    x_RH = make_rows(6, dtype)
    logits_R1 = torch.tensor([[0.0], [1.5], [-2.5], [200.0], [-200.0], [3.0]])
    actual = sigmoid_scaled(x_RH, logits_R1)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual, sigmoid_scaled_reference(x_RH, logits_R1), atol=1e-6, rtol=TOLERANCE[dtype]
    )
    alone = [sigmoid_scaled(x_RH[r : r + 1], logits_R1[r : r + 1]) for r in range(6)]
    assert torch.equal(actual, torch.cat(alone))
    assert torch.equal(actual[3], x_RH[3])
    for wrong in (logits_R1[:5], logits_R1[:, 0], logits_R1.double()):
        with pytest.raises(ValueError, match="logits are"):
            sigmoid_scaled(x_RH, wrong)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ffn_matches_the_reference(dtype: torch.dtype, activation: Activation) -> None:
    """The fused FFN agrees with PyTorch, with and without biases."""
    x_RH = make_rows(9, dtype)
    for expert in (make_experts(dtype)[0], make_experts(dtype, bias=True)[0]):
        expected = gated_mlp_reference(x_RH, expert, activation)
        actual = gated_mlp(x_RH, expert, activation)
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_one_ffn_equals_its_parts_bit_by_bit(activation: Activation) -> None:
    """Fusion changes nothing: two linears and an activation, rounded where the contract says."""
    x_RH, expert = make_rows(20, torch.bfloat16), make_experts(torch.bfloat16, bias=True)[0]
    in_order = pack_linear(expert.gate_up.weight_KN.t(), expert.gate_up.bias_N)
    gate_up = linear(x_RH, in_order, out_dtype=torch.float32)
    expected = linear(gated_activation(gate_up, activation).to(torch.bfloat16), expert.down)
    assert torch.equal(expected, gated_mlp(x_RH, expert, activation))


def test_biases_are_added_once_to_each_output() -> None:
    """With zero weights the FFN is down's bias plus nothing; the biases are not rounded."""
    zeros = torch.zeros(2 * INTERMEDIATE, HIDDEN), torch.zeros(HIDDEN, INTERMEDIATE)
    bias_H = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))
    expert = pack_expert(*zeros, torch.ones(2 * INTERMEDIATE), bias_H)
    out_RH = gated_mlp(make_rows(3, torch.float32), expert, SILU)
    assert torch.equal(out_RH, bias_H.expand(3, -1))


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
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_a_pair_has_the_same_bits_alone_and_in_any_call(
    dtype: torch.dtype, activation: Activation
) -> None:
    """Order and company of pairs, and NaN in other rows, leave a result as it is."""
    rng = np.random.default_rng(6)
    rows, experts = rng.integers(0, 12, 60), rng.integers(0, EXPERTS, 60)
    x_RH, weights = make_rows(13, dtype), make_experts(dtype, bias=True)
    together = grouped_mlp(x_RH, rows, experts, weights, activation)
    order = rng.permutation(60)
    shuffled = grouped_mlp(x_RH, rows[order], experts[order], weights, activation)
    alone = [
        gated_mlp(x_RH[r : r + 1], weights[e], activation)
        for r, e in zip(rows, experts, strict=True)
    ]
    assert torch.equal(together[torch.from_numpy(order)], shuffled)
    assert torch.equal(together, torch.cat(alone))
    x_RH[12] = torch.nan
    with_nan = grouped_mlp(
        x_RH, np.append(rows, 12), np.append(experts, experts[0]), weights, activation
    )
    assert torch.equal(together, with_nan[:60])


def test_no_pairs_give_no_rows() -> None:
    """An empty list of pairs is answered with an empty result."""
    nothing = np.empty(0, np.int64)
    out = grouped_mlp(make_rows(2, torch.float32), nothing, nothing, ExpertTable({}), SILU)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 150])
def test_combined_experts_equal_their_two_steps_bit_by_bit(rows: int, dtype: torch.dtype) -> None:
    """The pairs of all slots, and their weighted sum in slot order."""
    rng = np.random.default_rng(rows)
    ids_TK = np.array([rng.permutation(EXPERTS)[:3] for _ in range(rows)], np.int32).reshape(
        rows, 3
    )
    routing = Routing.of(ids_TK, rng.random((rows, 3), np.float32), EXPERTS)
    x_RH, weights = make_rows(rows, dtype), make_experts(dtype)
    pairs = np.repeat(np.arange(rows), 3), ids_TK.reshape(-1).astype(np.int64)
    outputs_SH = grouped_mlp(x_RH, *pairs, weights, SILU)
    expected = combine(outputs_SH, routing.topk_weights_TK)
    assert torch.equal(expected, combined_mlp(x_RH, routing, weights, SILU))


def test_combined_experts_name_what_is_wrong() -> None:
    """An absent expert, rows of another width or dtype."""
    weights = make_experts(torch.float32)
    routing = Routing.of(np.array([[0, 9]], np.int32), np.ones((1, 2), np.float32), 10)
    with pytest.raises(KeyError, match="expert 9 is not in the table"):
        combined_mlp(make_rows(1, torch.float32), routing, weights, SILU)
    with pytest.raises(ValueError, match=f"x has 3 features, expected {HIDDEN}"):
        combined_mlp(torch.ones(1, 3), routing, weights, SILU)
