"""Experts in Triton: against the reference, skewed, empty, with NaN around, and invariant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.formats.codec import Codec
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.model_config import GELU_TANH, SILU, Activation
from expertmesh_kernels.grouped_mlp import (
    ExpertWeights,
    gated_mlp_reference,
    grouped_mlp_reference,
)
from expertmesh_kernels.linear import pack_linear
from expertmesh_kernels.triton.grouped_mlp import MlpTables, gated_mlp, grouped_mlp
from expertmesh_kernels.triton.stored import device_weight
from expertmesh_kernels.triton.weights import DeviceWeight, plain, table_of
from tests.support.blas import needs_bits_of_rows
from tests.support.poison import poisoned
from tests.unit.kernels.triton.test_small import random

HIDDEN, INTERMEDIATE, EXPERTS = 72, 50, 5
ACTIVATIONS = [SILU, GELU_TANH, Activation("clamped_swiglu", alpha=1.7, limit=3.0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = np.array([0, 1, 2, 3, 4, 5, 6, 0, 0, 2])
SKEWED = np.array([3, 1, 1, 4, 3, 3, 0, 3, 3, 3])  # expert 2 has none, 0 and 4 have one


class Layer:
    """Experts on the host for the reference, and on a device for the kernel."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, bias: bool) -> None:
        self.experts: dict[int, ExpertWeights] = {}
        kept: tuple[list[DeviceWeight], list[DeviceWeight]] = [], []
        for expert in range(EXPERTS):
            shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
            parts = []
            for part, (rows, columns) in enumerate(shapes):
                seed = 10 * expert + part
                weight = (random(rows, columns, seed=seed) / columns**0.5).to(dtype)
                bias_N = random(rows, seed=seed + 5).to(dtype) if bias else None
                parts.append(pack_linear(weight, bias_N))
                on_device = None if bias_N is None else bias_N.to(device)
                kept[part].append(plain(weight.T.contiguous().to(device), on_device))
            self.experts[expert] = ExpertWeights(*parts)
        self.kept = kept
        self.tables = MlpTables(table_of(kept[0]), table_of(kept[1]))


@pytest.mark.parametrize(
    ("dtype", "activation", "bias"),
    [
        *((torch.float32, activation, True) for activation in ACTIVATIONS),
        *((dtype, SILU, False) for dtype in DTYPES),
    ],
)
def test_matches_the_reference(
    dtype: torch.dtype, activation: Activation, bias: bool, device: torch.device
) -> None:
    """A row in several pairs or in none, experts with one pair or none, NaN around the rows."""
    layer = Layer(dtype, device, bias=bias)
    x_RH = random(8, HIDDEN, seed=99).to(dtype)
    where = torch.from_numpy(ROWS).to(device), torch.from_numpy(SKEWED).int().to(device)
    actual = grouped_mlp(poisoned(x_RH.to(device)), *where, layer.tables, activation)
    expected = grouped_mlp_reference(x_RH, ROWS, SKEWED, layer.experts, activation)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_has_the_same_bits_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    """Alone, in another order, among neighbours of NaN, and where tiles of many rows are used."""
    layer, experts = Layer(dtype, device, bias=True), np.arange(8) % EXPERTS
    x_RH = random(8, HIDDEN, seed=99).to(dtype).to(device)

    def run(rows: Sequence[int], owners: Sequence[int], x: Tensor = x_RH) -> Tensor:
        where = torch.tensor(rows, device=device), torch.tensor(owners, device=device).int()
        return grouped_mlp(x, *where, layer.tables, SILU)

    together = run(range(8), experts.tolist())
    assert torch.equal(run([5], [0]), together[5:6])
    assert torch.equal(run(range(7, -1, -1), experts[::-1].tolist()).flip(0), together)
    many = run([3] * 69 + [5], [3] * 69 + [0])
    assert torch.equal(many[[0, 68, 69]], together[[3, 3, 5]])
    x = x_RH.clone()
    x[::2] = torch.nan
    assert torch.equal(run(range(8), experts.tolist(), x)[1::2], together[1::2])


def test_pairs_of_nobody_are_left_out(device: torch.device) -> None:
    """Padding of a fixed grid: other pairs are computed as without."""
    layer = Layer(torch.float32, device, bias=False)
    x_RH, rows = random(3, HIDDEN).to(device), torch.tensor([0, 1, 2, 1], device=device)
    owners = torch.tensor([2, -1, 0, 4], device=device, dtype=torch.int32)
    actual = grouped_mlp(x_RH, rows, owners, layer.tables, SILU)[[0, 2, 3]]
    kept = torch.tensor([0, 2, 3], device=device)
    assert torch.equal(actual, grouped_mlp(x_RH, rows[kept], owners[kept], layer.tables, SILU))


@needs_bits_of_rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ffn_for_all_rows(dtype: torch.dtype, device: torch.device) -> None:
    """As a shared expert, for few rows and many; no rows give none."""
    layer = Layer(dtype, device, bias=True)
    tables = MlpTables(*(table_of(weights[:1]) for weights in layer.kept))
    x_RH = random(40, HIDDEN, seed=99).to(dtype)
    actual = gated_mlp(poisoned(x_RH.to(device)), tables, SILU)
    expected = gated_mlp_reference(x_RH, layer.experts[0], SILU)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(gated_mlp(x_RH[7:9].to(device), tables, SILU), actual[7:9])
    assert gated_mlp(x_RH[:0].to(device), tables, SILU).shape == (0, HIDDEN)


CODECS: dict[str, tuple[Codec, int]] = {
    "int8 per channel": (ScaledBytes("int8", Scaling("channel")), 72),
    "int8 per group, asymmetric": (
        ScaledBytes("int8", Scaling("group", (1, 16), symmetric=False)),
        96,
    ),
    "packed int8": (PackedIntegers(8, Scaling("group", (1, 64))), 128),
    "int4 per group of 32": (PackedIntegers(4, Scaling("group", (1, 32))), 96),
    "int4 per group of 16, asymmetric": (
        PackedIntegers(4, Scaling("group", (1, 16), symmetric=False)),
        80,
    ),
    "int4 per group of 128": (PackedIntegers(4, Scaling("group", (1, 128))), 256),
    "int4 per channel": (PackedIntegers(4, Scaling("channel")), 72),
    "fp8": (Fp8Blocks(128, 128), 136),
    "mxfp4": (Mxfp4(), 96),
}


@pytest.mark.parametrize("name", CODECS)
def test_quantised_weights_are_what_their_codec_decodes(name: str, device: torch.device) -> None:
    """Experts with weights as files store them, against the reference with decoded weights."""
    codec, depth = CODECS[name]
    columns = 2 * depth if name == "fp8" else 64  # so that both have several blocks
    quantised: tuple[list[DeviceWeight], list[DeviceWeight]] = [], []
    decoded: dict[int, ExpertWeights] = {}
    for expert in range(2):
        both = []
        for part, shape in enumerate([(columns, depth), (depth, columns // 2)]):
            small = random(*shape, seed=10 * expert + part) / shape[1] ** 0.5
            size = np.exp2(np.arange(shape[0]) % 5).astype(np.float32)[:, None]
            weight, bias_N = small.numpy() * size, random(shape[0], seed=7)
            own = codec if shape[1] == depth else _for_depth(codec, shape[1])
            stored = encode(own, weight)
            wide = np.empty(shape, np.float32)
            own.decode(stored, wide)
            both.append(pack_linear(torch.from_numpy(wide), bias_N))
            quantised[part].append(device_weight(own, stored, device, bias_N.to(device)))
        decoded[expert] = ExpertWeights(*both)
    tables = MlpTables(table_of(quantised[0]), table_of(quantised[1]))
    x_RH, rows, owners = random(4, depth, seed=99), np.array([0, 1, 2, 3]), np.array([1, 0, 1, 1])
    where = torch.from_numpy(rows).to(device), torch.from_numpy(owners).int().to(device)
    actual = grouped_mlp(poisoned(x_RH.to(device)), *where, tables, SILU)
    expected = grouped_mlp_reference(x_RH, rows, owners, decoded, SILU)
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual.cpu() / scale, expected / scale, rtol=1e-5, atol=1e-5)


def _for_depth(codec: Codec, depth: int) -> Codec:
    """The down projection's: its depth may not hold whole groups."""
    if isinstance(codec, PackedIntegers | ScaledBytes) and depth % (codec.scaling.block[1] or 1):
        bits = 8 if isinstance(codec, ScaledBytes) else codec.bits
        return PackedIntegers(bits, Scaling("channel", symmetric=codec.scaling.symmetric))
    return codec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4 per group of 32", "mxfp4", "fp8"])
def test_quantised_weights_are_rounded_to_the_type_of_the_rows(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """As if they had been expanded when they were read."""
    codec, depth = CODECS[name]
    weight = (random(64, depth) / depth**0.5).numpy()
    stored = encode(codec, weight)
    wide = np.empty(weight.shape, np.float32)
    codec.decode(stored, wide)
    expanded = torch.from_numpy(wide).to(dtype).to(device)
    down = plain(random(32, 16, seed=3).to(dtype).to(device))
    down_table = table_of([down])
    x_RH = random(3, depth, seed=4).to(dtype).to(device)
    kept = device_weight(codec, stored, device), plain(expanded.T.contiguous())
    actual, expected = (
        gated_mlp(x_RH, MlpTables(table_of([one]), down_table), SILU).float() for one in kept
    )
    torch.testing.assert_close(actual, expected, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_tables_hold_weights_of_one_kind(device: torch.device) -> None:
    """Another shape or dtype, and formats that kernels do not expand, are refused."""
    one, other = (plain(torch.ones(32, size, device=device)) for size in (16, 48))
    with pytest.raises(ValueError, match="weights of 2 kinds"):
        table_of([one, other])
    codec = ScaledBytes("fp8", Scaling("channel"))
    with pytest.raises(ValueError, match="cannot be kept quantised"):
        device_weight(codec, encode(codec, np.ones((4, 32), np.float32)), device)
