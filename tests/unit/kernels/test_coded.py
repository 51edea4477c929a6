"""Experts that stay quantised, against what their formats' decoders make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.formats.codec import Codec
from expertmesh.formats.coded import CodedMatrix, CodeName, quantize_int4, quantize_int8
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.keep import coding_of, keep
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.host_tensor import Float32
from expertmesh.model_config import SILU, Activation
from expertmesh_kernels.grouped_mlp import (
    ExpertTable,
    grouped_mlp,
    grouped_mlp_reference,
    pack_coded_expert,
    pack_expert,
)
from expertmesh_kernels.linear import pack_coded_linear

EXPERTS = 3
GROUPS = Scaling("group", (1, 32))
CODECS: dict[str, Codec] = {
    "int8 per channel": ScaledBytes("int8", Scaling("channel")),
    "int8 per group, packed": PackedIntegers(8, GROUPS),
    "int8 per tensor": ScaledBytes("int8", Scaling("tensor")),
    "int4 per group": PackedIntegers(4, GROUPS),
    "int4 per channel, asymmetric": PackedIntegers(4, Scaling("channel", symmetric=False)),
    "int4 per group, asymmetric": PackedIntegers(4, Scaling("group", (1, 32), symmetric=False)),
    "fp8 in blocks": Fp8Blocks(40, 64),
    "fp8 per channel": ScaledBytes("fp8", Scaling("channel")),
    "mxfp4": Mxfp4(),
}
BFLOAT16 = [pytest.param(name, torch.bfloat16, id=f"{name}, bfloat16") for name in CODECS]
FLOAT32 = [
    pytest.param(
        name,
        torch.float32,
        id=f"{name}, float32",
        marks=() if name.startswith("int8") else pytest.mark.slow,  # each kind is compiled
    )
    for name in CODECS
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Made:
    """Experts that stay quantised, and the same decoded."""

    coded: ExpertTable
    decoded: ExpertTable
    hidden: int


def make(codec: Codec, dtype: torch.dtype, hidden: int = 96, width: int = 160) -> Made:
    """Seeded experts with biases and outputs of order one, and with a row and columns of zeros."""
    rng = np.random.default_rng(5)
    coded, decoded = {}, {}
    for expert in range(EXPERTS):
        pairs = []
        for rows, columns in ((2 * width, hidden), (hidden, width)):
            weight = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
            weight[3], weight[:, 32:64] = 0, 0
            weight[7] *= 50
            pairs.append(both(codec, weight))
        biases = [torch.from_numpy(rng.standard_normal(n)).to(dtype) for n in (2 * width, hidden)]
        coded[expert] = pack_coded_expert(pairs[0][0], pairs[1][0], *biases, dtype=dtype)
        plain = [torch.from_numpy(pair[1]) for pair in pairs]
        decoded[expert] = pack_expert(*plain, *biases)
    return Made(ExpertTable(coded), ExpertTable(decoded), hidden)


def both(codec: Codec, weight: Float32) -> tuple[CodedMatrix, Float32]:
    """Codes as kernels take them, and what the format's decoder makes of the same parts."""
    parts = encode(codec, weight)
    decoded = np.empty(weight.shape, np.float32)
    codec.decode(parts, decoded)
    return keep(codec, parts, *weight.shape), decoded


def make_rows(count: int, made: Made, dtype: torch.dtype) -> Tensor:
    """Seeded hidden states."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, made.hidden, generator=generator).to(dtype)


@pytest.mark.parametrize(("name", "dtype"), BFLOAT16 + FLOAT32)
def test_experts_are_those_of_the_decoder(name: str, dtype: torch.dtype) -> None:
    """Few rows and many, skewed, and an expert without any; packing loses nothing."""
    made = make(CODECS[name], dtype)
    for expert, weights in made.coded.items():
        for ours, theirs in (
            (weights.gate_up, made.decoded[expert].gate_up),
            (weights.down, made.decoded[expert].down),
        ):
            torch.testing.assert_close(ours.weight_KN, theirs.weight_KN, rtol=1e-6, atol=0)
    for count in (1, 2, 17, 33, 250):
        x_RH = make_rows(count, made, dtype)
        rows, experts = np.arange(count), np.where(np.arange(count) % 40 == 1, 2, 0)
        actual = grouped_mlp(x_RH, rows, experts, made.coded, SILU)
        expected = grouped_mlp_reference(x_RH, rows, experts, made.decoded, SILU)
        error = (actual - expected).float().abs().max() / expected.abs().max()
        assert float(error) < TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "dtype"), BFLOAT16 + FLOAT32)
def test_a_row_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    """Alone, in tiles of every size, in the last block; beside NaN and infinity too."""
    made = make(CODECS[name], dtype)
    x_RH = make_rows(250, made, dtype)
    rows, experts = np.arange(250), np.zeros(250, np.int64)
    together = grouped_mlp(x_RH, rows, experts, made.coded, SILU)
    for part in (rows[:1], rows[10:26], rows[190:193], rows[::-1].copy(), rows[217:250]):
        alone = grouped_mlp(x_RH, part, experts[: len(part)], made.coded, SILU)
        assert torch.equal(alone, together[torch.from_numpy(part)])
    x_RH[5], x_RH[200, 3] = torch.nan, torch.inf
    damaged = grouped_mlp(x_RH, rows, experts, made.coded, SILU)
    others = np.setdiff1d(rows, [5, 200])
    assert torch.equal(damaged[others], together[others])
    assert damaged[5].isnan().all()
    assert not damaged[200].isfinite().all()


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (32, 4), (100, 50), (40, 300), (288, 33)])
def test_any_shape(hidden: int, width: int) -> None:
    """Sizes that are no multiple of a step, a tile, a panel or a group."""
    codec, dtype = ScaledBytes("int8", Scaling("channel")), torch.bfloat16
    clamped = Activation("clamped_swiglu", alpha=1.7, limit=3.0)
    check_near(make(codec, dtype, hidden, width), dtype, clamped)
    made = make_on_load(lambda weight: quantize_int4(weight, 64), dtype, hidden, width)
    check_near(made, dtype, clamped)


def make_on_load(
    quantize: Callable[[Float32], CodedMatrix], dtype: torch.dtype, hidden: int, width: int
) -> Made:
    """One expert, quantised as a plain checkpoint is when it is loaded."""
    rng = np.random.default_rng(1)
    weights = [
        (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        for rows, columns in ((2 * width, hidden), (hidden, width))
    ]
    codes = [quantize(weight) for weight in weights]
    plain = [torch.from_numpy(matrix.decoded()) for matrix in codes]
    return Made(
        ExpertTable({0: pack_coded_expert(codes[0], codes[1], dtype=dtype)}),
        ExpertTable({0: pack_expert(plain[0], plain[1])}),
        hidden,
    )


def check_near(made: Made, dtype: torch.dtype, activation: Activation) -> None:
    """35 rows through expert 0."""
    x_RH, rows = make_rows(35, made, dtype), np.arange(35)
    actual = grouped_mlp(x_RH, rows, rows * 0, made.coded, activation)
    expected = grouped_mlp_reference(x_RH, rows, rows * 0, made.decoded, activation)
    error = (actual - expected).float().abs().max() / expected.abs().max()
    assert float(error) < TOLERANCE[dtype]


def every_code(kind: str) -> Iterable[int]:
    """All but NaN."""
    codes = range(256 if kind in ("int8", "fp8") else 16)
    return [code for code in codes if kind != "fp8" or code & 127 != 127]


@pytest.mark.parametrize(
    ("kind", "large"), [("int8", 64), ("int4", 15), ("fp8", 104), ("mxfp4", 7)]
)
def test_every_code_is_exact(kind: CodeName, large: int) -> None:
    """Activations that are one-hot pick each code's number times its scale, to the last bit.

    A large number, given by its code, on the diagonals of gate and up makes them one-hot.
    """
    codes, zero = np.array(every_code(kind), np.uint8), 3 if kind == "int4" else 0
    size = max(64, -(-len(codes) // 32) * 32)
    down, diagonal = np.zeros((size, size), np.uint8), np.full((size, size), zero, np.uint8)
    down[:, : len(codes)] = codes
    np.fill_diagonal(diagonal, large)
    zeros = np.full((2 * size, 1), zero, np.uint8) if kind == "int4" else None
    scales = np.full((2 * size, 1), 0.5, np.float32)
    parts = [
        CodedMatrix(kind, np.concatenate([diagonal, diagonal]), scales * 2, 0, zeros),
        CodedMatrix(kind, down, scales[:size], 0, None if zeros is None else zeros[:size]),
    ]
    coded = ExpertTable({0: pack_coded_expert(parts[0], parts[1], dtype=torch.bfloat16)})
    plain = [torch.from_numpy(part.decoded()) for part in parts]
    x_RH, rows = torch.eye(size).bfloat16(), np.arange(size)
    found = grouped_mlp(x_RH, rows, rows * 0, coded, SILU)
    exact = ExpertTable({0: pack_expert(plain[0], plain[1])})
    assert torch.equal(found, grouped_mlp_reference(x_RH, rows, rows * 0, exact, SILU))


def test_what_no_kernel_takes_is_refused() -> None:
    """Groups that are no whole steps, and parts of an expert that are quantised differently."""
    weight = np.ones((64, 64), np.float32)
    assert coding_of(PackedIntegers(4, Scaling("group", (1, 8)))) is None
    assert coding_of(ScaledBytes("int8", Scaling("channel", symmetric=False))) is None
    with pytest.raises(ValueError, match="groups of 8 columns"):
        pack_coded_linear(quantize_int4(weight, 8), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected the same"):
        pack_coded_expert(quantize_int4(weight, 32), quantize_int8(weight), dtype=torch.bfloat16)


def test_quantising_on_load_is_nearest() -> None:
    """Within half a step, zero rows exactly zero, the largest value exactly; NaN never appears."""
    weight = np.random.default_rng(0).standard_normal((20, 100)).astype(np.float32)
    weight[4], weight[5, 7], weight[6] = 0, 1e30, 1e-41
    for matrix, steps in ((quantize_int8(weight), 127), (quantize_int4(weight, 32), 7)):
        groups = matrix.group or 100
        for start in range(0, 100, groups):
            part, found = (a[:, start : start + groups] for a in (weight, matrix.decoded()))
            peaks = np.abs(part).max(1, keepdims=True)
            assert (np.abs(found - part) <= peaks / steps * 0.5001 + 1e-40).all()
            assert not found[4].any()
