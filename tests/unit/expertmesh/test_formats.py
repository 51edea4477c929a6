"""Decoders of quantised weights equal the libraries that define the formats, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import (
    Fp8Dequantize,
    Fp8Quantize,
    _dequantize_fp8_weight,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertmesh.formats.codec import NUMPY_TYPES, Codec, PartData
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling

with warnings.catch_warnings():  # of its imports
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
SCALINGS = [
    ("channel", True),
    ("channel", False),
    ("group", True),
    ("group", False),
    ("tensor", True),
]


def test_every_fp8_code_has_its_value() -> None:
    """All 256 codes, with -0 and subnormals; the two codes of NaN decode to NaN."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256).view(torch.float8_e4m3fn)
    found = _decode(Fp8Blocks(1, 256), [codes, torch.ones(1, 1)], (1, 256))
    _assert_same_bits(codes.float(), found)
    assert np.flatnonzero(np.isnan(found[0])).tolist() == [127, 255]


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 1)])
def test_fp8_equals_transformers(scale_format: str, block: tuple[int, int]) -> None:
    """What transformers quantises is decoded as transformers does it."""
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_format)
    quantizer = SimpleNamespace(quantization_config=config)
    weight = _weights(256, 384)
    stored = Fp8Quantize(quantizer).convert({"x.weight": weight})
    codes, scales = stored["x.weight"], stored["x.weight_scale_inv"]
    expected = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, torch.float32)
    _assert_same_bits(expected, _decode(Fp8Blocks(*block), [codes, scales], (256, 384)))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(576, 200), (1, 1), (127, 129), (3, 5), (129, 1)])
def test_fp8_with_short_last_blocks(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    """Sizes that blocks do not divide: the last scales belong to what is left."""
    rows, columns = shape
    codes = _weights(rows, columns).to(torch.float8_e4m3fn)
    scales = _weights(-(-rows // 128), -(-columns // 128)).to(scale_dtype)
    expected = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    _assert_same_bits(expected, _decode(Fp8Blocks(128, 128), [codes, scales], shape))


def test_byte_scales_of_fp8_are_powers_of_two() -> None:
    """All bytes: 0 is 2 ** -127, 254 is 2 ** 127, 255 is NaN."""
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    codes = torch.ones(1, 256).to(torch.float8_e4m3fn)
    expected = scales.view(torch.float8_e8m0fnu).float()
    assert expected[0, 0] == 2.0**-127
    for stored in (scales, scales.view(torch.float8_e8m0fnu)):
        found = _decode(Fp8Blocks(1, 1, byte_scales=True), [codes, stored], (1, 256))
        _assert_same_bits(expected, found)


def test_every_mxfp4_byte_and_exponent_has_its_value() -> None:
    """All pairs of codes under all exponents but NaN's, as transformers decodes them."""
    bytes_ = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    blocks = bytes_.repeat(255, 1).reshape(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)[0]
    found = _decode(Mxfp4(), [blocks[0], scales[0]], (255, 512))
    _assert_same_bits(expected, found)
    scales = torch.full((255, 16), 255, dtype=torch.uint8)
    assert np.isnan(_decode(Mxfp4(), [blocks[0], scales], (255, 512))).all()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("strategy", "symmetric"), SCALINGS)
@pytest.mark.parametrize(
    ("storage", "bits"),
    [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8), ("naive-quantized", 8)],
)
@pytest.mark.parametrize("shape", [(64, 96), (33, 32), (9, 160)])
def test_integers_equal_compressed_tensors(
    storage: str,
    bits: int,
    strategy: str,
    symmetric: bool,
    scale_dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    """What compressed-tensors compresses is decoded as it decompresses it, in its scales' type."""
    group_size = 32 if strategy == "group" else None
    stored, expected = _compress(
        storage, _weights(*shape).to(scale_dtype), bits, strategy, symmetric, group_size
    )
    scaling = Scaling(strategy, (1, group_size) if group_size else (0, 0), symmetric)
    codec = _integers(storage, bits, scaling)
    found = _decode(codec, _in_order(codec, stored, shape), shape)
    _assert_same_bits(expected.float(), _rounded(found, scale_dtype))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("shape", [(64, 96), (33, 50), (1, 1)])
def test_scaled_fp8_equals_compressed_tensors(
    strategy: str, storage: str, scale_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """FP8 under the other names and strategies that compressed-tensors has; ragged blocks too."""
    block = (16, 32) if strategy == "block" else (0, 0)
    codec = ScaledBytes("fp8", Scaling(strategy, block))
    weight = _weights(*shape)
    scale = torch.from_numpy(encode(codec, weight.numpy())[1].data).to(scale_dtype)
    structure = list(block) if strategy == "block" else None
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=structure)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(storage)
    state = {"weight": weight.to(scale_dtype), "weight_scale": scale}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    found = _decode(codec, _in_order(codec, stored, shape), shape)
    _assert_same_bits(expected.float(), _rounded(found, scale_dtype))


@pytest.mark.parametrize("columns", [1, 3, 8, 9, 31, 33])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_may_be_partly_filled(bits: int, columns: int) -> None:
    """Columns, and rows of zero points, that do not fill the last word."""
    shape = (5, columns)
    stored, expected = _compress(
        "pack-quantized", _weights(*shape), bits, "channel", symmetric=False, group_size=None
    )
    codec = PackedIntegers(bits, Scaling("channel", symmetric=False))
    _assert_same_bits(expected, _decode(codec, _in_order(codec, stored, shape), shape))


def test_packed_shape_has_to_be_the_weights() -> None:
    """A stored shape that contradicts the config is named."""
    stored, _ = _compress("pack-quantized", _weights(8, 32), 4, "channel", True, None)
    stored["weight_shape"] = torch.tensor([8, 31])
    codec = PackedIntegers(4, Scaling("channel"))
    with pytest.raises(ValueError, match=r"_shape: expected \[8, 32\], found \[8, 31\]"):
        _decode(codec, _in_order(codec, stored, (8, 32)), (8, 32))


@pytest.mark.parametrize(
    ("codec", "shape", "expected"),
    [
        (Mxfp4(), (4, 33), "columns in blocks of 32, and there are 33"),
        (
            ScaledBytes("int8", Scaling("group", (1, 32))),
            (4, 48),
            "groups of 32 columns do not divide its 48",
        ),
        (PackedIntegers(4, Scaling("group", (1, 5))), (4, 48), "groups of 5 columns do not divide"),
        (PackedIntegers(4, Scaling("channel")), (2, 4, 48), "stacked in one tensor"),
        (Fp8Blocks(128, 128), (48,), "only matrices are quantised"),
    ],
)
def test_shapes_that_a_codec_cannot_store(
    codec: Codec, shape: tuple[int, ...], expected: str
) -> None:
    """What cannot be stored is said before anything is read."""
    with pytest.raises(ValueError, match=expected):
        codec.parts(shape)


def test_stacked_weights_have_axes_in_front() -> None:
    """An entry of a stacked weight has an entry of each part."""
    fp8 = [part.shape for part in Fp8Blocks(128, 128).parts((6, 300, 200))]
    assert fp8 == [(6, 300, 200), (6, 3, 2)]
    assert [part.shape for part in Mxfp4().parts((6, 64, 96))] == [(6, 64, 3, 16), (6, 64, 3)]


@pytest.mark.parametrize(
    ("codec", "shape", "steps"),
    [
        (Fp8Blocks(128, 128), (200, 130), 16),
        (Mxfp4(), (6, 96), 3),
        (PackedIntegers(4, Scaling("group", (1, 32))), (5, 64), 14),
        (PackedIntegers(4, Scaling("channel", symmetric=False)), (9, 33), 15),
        (PackedIntegers(8, Scaling("group", (1, 32), symmetric=False)), (5, 64), 255),
        (ScaledBytes("int8", Scaling("channel")), (5, 64), 254),
        (ScaledBytes("fp8", Scaling("tensor")), (5, 64), 16),
        (ScaledBytes("fp8", Scaling("block", (4, 20))), (5, 64), 16),
        (ScaledBytes("int8", Scaling("tensor", symmetric=False)), (5, 64), 255),
    ],
)
def test_what_is_encoded_is_decoded(codec: Codec, shape: tuple[int, int], steps: int) -> None:
    """Encoders give the parts that the codec has, and a weight within half a step.

    Encoding what was decoded changes nothing.
    """
    weight = _weights(*shape).numpy()
    once = _coded(codec, weight)
    step = np.abs(weight).max() * 2 / steps
    assert np.abs(once - weight).max() <= step / 2 * 1.001
    assert np.abs(_coded(codec, once) - once).max() <= 1e-6 * np.abs(weight).max()
    assert not _coded(codec, np.zeros(shape, np.float32)).any()


def test_encoded_fp8_is_what_torch_rounds_to() -> None:
    """Ties go to the even code, as everywhere in floating point."""
    weight = _weights(64, 64)
    weight[0] = torch.arange(64) * 0.5 + 16.25
    weight[0, 0] = 448
    codes = encode(Fp8Blocks(1, 64), weight.numpy())[0].data
    scaled = weight / (weight.abs().amax(1, keepdim=True) / 448)
    np.testing.assert_array_equal(scaled.to(torch.float8_e4m3fn).view(torch.uint8), codes)


def _coded(codec: Codec, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    stored = encode(codec, weight)
    for part, data in zip(codec.parts(weight.shape), stored, strict=True):
        assert part.shape == data.data.shape
        assert data.dtype_code in part.dtype_codes
        assert data.data.dtype == NUMPY_TYPES[data.dtype_code]
    found = np.empty_like(weight)
    codec.decode(stored, found)
    return found


def _weights(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator)


def _compress(
    storage: str,
    weight: torch.Tensor,
    bits: int,
    strategy: str,
    symmetric: bool,
    group_size: int | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors and what they mean, both from compressed-tensors."""
    args = QuantizationArgs(
        num_bits=bits, strategy=strategy, symmetric=symmetric, group_size=group_size
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    dims = weight.reshape(-1, weight.shape[1] if group_size is None else group_size)
    low, high = dims.amin(1), dims.amax(1)
    if strategy == "tensor":
        low, high = low.min(), high.max()
    scale, zero = calculate_qparams(low, high, args)
    grid = (1,) if strategy == "tensor" else (len(weight), -1)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype).reshape(grid)}
    if not symmetric:
        state["weight_zero_point"] = zero.to(torch.int8).reshape(grid)
    compressor = BaseCompressor.get_value_from_registry(storage)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def _integers(storage: str, bits: int, scaling: Scaling) -> Codec:
    packed = storage == "pack-quantized"
    return PackedIntegers(bits, scaling) if packed else ScaledBytes("int8", scaling)


def _in_order(
    codec: Codec, stored: dict[str, torch.Tensor], shape: tuple[int, int]
) -> list[torch.Tensor]:
    """The stored tensors that the format asks for, with the shapes and types that it expects."""
    parts = codec.parts(shape)
    found = [stored["weight" + part.suffix] for part in parts]
    assert [part.shape for part in parts] == [tuple(tensor.shape) for tensor in found]
    assert len(stored) == len(parts)
    for part, tensor in zip(parts, found, strict=True):
        assert CODES[tensor.dtype] in part.dtype_codes
    return found


def _decode(
    codec: Codec, tensors: Sequence[torch.Tensor], shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    parts = [
        PartData(t.contiguous().view(BITS.get(t.dtype, t.dtype)).numpy(), CODES[t.dtype])
        for t in tensors
    ]
    found = np.full(shape, np.nan, np.float32)
    codec.decode(parts, found)
    return found


def _rounded(weight: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.float32]:
    return torch.from_numpy(weight).to(dtype).float().numpy()


def _assert_same_bits(expected: torch.Tensor, found: npt.NDArray[np.float32]) -> None:
    """Equal bits; all NaN count as one."""
    both_nan = expected.isnan().numpy() & np.isnan(found)
    bits = [
        np.where(both_nan, 0, x.view(np.uint32)) for x in (expected.contiguous().numpy(), found)
    ]
    np.testing.assert_array_equal(*bits)
