"""The ops on CUDA tensors against the same ops on the CPU, and what they compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from expertmesh.model_config import SILU, GateConfig, KvLayout, RopeConfig
from expertmesh_kernels.activation import gated_activation, sigmoid_scaled
from expertmesh_kernels.combine import combine
from expertmesh_kernels.grouped_mlp import ExpertTable, gated_mlp, grouped_mlp, pack_expert
from expertmesh_kernels.heads import head_linear, pack_heads
from expertmesh_kernels.linear import linear, pack_linear
from expertmesh_kernels.norm import add_rms_norm, rms_norm, rms_norm_heads_
from expertmesh_kernels.paged_attention import AttentionOptions, KvCache, paged_attention, write_kv
from expertmesh_kernels.rope import apply_rope, rope_table
from expertmesh_kernels.router import Gate, Routing, choose_experts, route
from expertmesh_kernels.sampling import sample
from expertmesh_kernels.triton import grouped_mlp as triton_mlp
from expertmesh_kernels.triton import linear as triton_linear
from expertmesh_kernels.triton import norm as triton_norm
from tests.unit.kernels.triton.test_small import random

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding, and on the device."""
    assert actual.device.type == "cuda"
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def same_choice(actual: Routing, expected: Routing) -> None:
    """The same experts in the same order."""
    np.testing.assert_array_equal(actual.topk_ids_TK, expected.topk_ids_TK)
    np.testing.assert_allclose(actual.topk_weights_TK, expected.topk_weights_TK, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_experts(dtype: torch.dtype, device: torch.device) -> None:
    """Linear layers, heads, one FFN, and experts with skewed rows."""
    x_RH = random(150, 72).to(dtype)
    weight, bias_N = (random(100, 72, seed=1) / 8).to(dtype), random(100, seed=2).to(dtype)
    on_device = pack_linear(weight.to(device), bias_N.to(device))
    close(linear(x_RH.to(device), on_device), linear(x_RH, pack_linear(weight, bias_N)))
    heads, x_TnK = (random(3, 40, 24, seed=3) / 5).to(dtype), x_RH.view(150, 3, 24)
    close(
        head_linear(x_TnK.to(device), pack_heads(heads.to(device))),
        head_linear(x_TnK, pack_heads(heads)),
    )
    shapes = [(100, 72), (72, 50)]
    parts = {e: [(random(*s, seed=e) / 8).to(dtype) for s in shapes] for e in (0, 2, 5)}
    there = ExpertTable({e: pack_expert(*(p.to(device) for p in own)) for e, own in parts.items()})
    here = ExpertTable({e: pack_expert(*own) for e, own in parts.items()})
    rows, owners = np.arange(150), np.where(np.arange(150) < 140, 5, 2)
    expected = grouped_mlp(x_RH, rows, owners, here, SILU)
    close(grouped_mlp(x_RH.to(device), rows, owners, there, SILU), expected)
    close(gated_mlp(x_RH.to(device), there[0], SILU), gated_mlp(x_RH, here[0], SILU))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rest_of_a_layer(dtype: torch.dtype, device: torch.device) -> None:
    """Norms, rope, attention, router, combine, activation."""
    x_TH, weight_H = random(20, 96).to(dtype), random(96, seed=1)
    close(rms_norm(x_TH.to(device), weight_H.to(device), 1e-5), rms_norm(x_TH, weight_H, 1e-5))
    for there, here in zip(
        add_rms_norm(x_TH.to(device), x_TH.to(device), weight_H.to(device), 1e-5),
        add_rms_norm(x_TH, x_TH, weight_H, 1e-5),
        strict=True,
    ):
        close(there, here)
    table, positions = rope_table(RopeConfig(theta=1e4, dim=32), 40), np.arange(20, dtype=np.int32)
    layout, options = KvLayout(1, 32, 32), AttentionOptions(0.2, 32, sliding_window=9)
    outputs = []
    for target in (torch.device("cpu"), device):
        q_TnD = x_TH.to(target, copy=True).view(20, 3, 32)
        rms_norm_heads_(q_TnD, weight_H[:32].to(target), 1e-5, whole=False)
        apply_rope(q_TnD, positions, table.to(target))
        pool = torch.full((3, layout.width * 16), torch.nan, dtype=dtype, device=target)
        cache = KvCache(pool, 0, layout, 16)
        write_kv(q_TnD[:, :1], q_TnD[:, 1:2], cache, np.arange(20))
        tables, sequences = np.array([[0, 1]], np.int32), np.zeros(20, np.int32)
        outputs.append(paged_attention(q_TnD, cache, tables, sequences, positions, options))
    close(outputs[1], outputs[0])
    logits_TE = random(20, 8, seed=3)
    gate, weight_EH = GateConfig(8, 2), random(8, 96, seed=4)
    here = route(logits_TE, gate)
    same_choice(route(logits_TE.to(device), gate), here)
    same_choice(
        choose_experts(x_TH.to(device), Gate(pack_linear(weight_EH.to(device)), gate)),
        choose_experts(x_TH, Gate(pack_linear(weight_EH), gate)),
    )
    weights_TK = here.topk_weights_TK[:10]
    close(combine(x_TH.to(device), weights_TK), combine(x_TH, weights_TK))
    close(gated_activation(x_TH.to(device), SILU), gated_activation(x_TH, SILU))
    scaled = sigmoid_scaled(x_TH.to(device), logits_TE[:, :1].to(device))
    close(scaled, sigmoid_scaled(x_TH, logits_TE[:, :1]))


def test_sampling_picks_the_tokens_of_the_cpu(device: torch.device) -> None:
    """A whole vocabulary; all filters at once."""
    logits_SV, rows = random(64, 50_000) * 3, 64
    settings = (
        np.linspace(0, 2, rows).astype(np.float32), np.full(rows, 0.001, np.float32),
        np.linspace(0.5, 1, rows).astype(np.float32), np.arange(rows, dtype=np.int32) * 3,
        np.arange(rows).astype(np.uint64) << np.uint64(50), np.arange(rows),
    )  # fmt: skip
    actual = sample(logits_SV.to(device), *settings)
    assert np.count_nonzero(actual != sample(logits_SV, *settings)) <= 1  # a near-tie, if any


def variants(kernel: JITFunction) -> int:
    """How many variants of a kernel have been compiled."""
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


def test_other_numbers_of_rows_compile_nothing(device: torch.device) -> None:
    """After one low and one tall tile."""
    weight = pack_linear(random(64, 48).to(device))
    shapes = [(64, 48), (48, 32)]
    experts = ExpertTable({0: pack_expert(*(random(*shape).to(device) for shape in shapes))})
    norm_H = torch.ones(48, device=device)

    def run(rows: int) -> None:
        x_RH = torch.randn(rows, 48, device=device)
        linear(x_RH, weight)
        rms_norm(x_RH, norm_H, 1e-5)
        grouped_mlp(x_RH, np.arange(rows), np.zeros(rows, np.int64), experts, SILU)

    run(1)
    run(500)
    kernels = [triton_linear._linear, triton_mlp._run, triton_norm._rms_norm]
    before = [variants(kernel) for kernel in kernels]
    for rows in (2, 3, 16, 17, 40, 64, 129, 1000):
        run(rows)
    assert [variants(kernel) for kernel in kernels] == before
