"""Encoders beside the decoders, for small models to try formats with: nearest codes, no search."""

from __future__ import annotations

from functools import singledispatch

import numpy as np
import numpy.typing as npt

from expertmesh.formats.codec import Codec, PartData
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import BLOCK, Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.formats.tables import FP4_VALUES, e4m3_values
from expertmesh.host_tensor import Array, Float32

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.floating]

_E4M3 = e4m3_values()[:127]
_FP4 = np.array(FP4_VALUES, np.float32)


@singledispatch
def encode(codec: Codec, weight: Float32) -> tuple[PartData, ...]:
    """The stored tensors of a matrix [rows, columns], in the order of `codec.parts`."""
    raise TypeError(f"no encoder for {codec.name}")


@encode.register
def _fp8(codec: Fp8Blocks, weight: Float32) -> tuple[PartData, ...]:
    return _fp8_in_blocks(weight, codec.block_rows, codec.block_columns)


@encode.register
def _mxfp4(_codec: Mxfp4, weight: Float32) -> tuple[PartData, ...]:
    in_blocks = weight.reshape(len(weight), -1, BLOCK)
    peaks = np.abs(in_blocks).max(-1)
    exponents = np.frexp(peaks)[1] - 3  # the largest value is 6 = 1.5 * 2 ** 2
    exponents = np.clip(exponents, -127, 127)
    codes = _nearest(_FP4, in_blocks / np.ldexp(1.0, exponents)[..., None], sign=8)
    return PartData(_halves(codes), "U8"), PartData((exponents + 127).astype(np.uint8), "U8")


@encode.register
def _packed(codec: PackedIntegers, weight: Float32) -> tuple[PartData, ...]:
    codes, scales, zeros = _integers(codec.scaling, codec.bits, weight)
    found = (
        PartData(_pack(codes, codec.bits), "I32"),
        PartData(scales, "F32"),
        PartData(np.array(weight.shape, np.int64), "I64"),
    )
    if codec.scaling.symmetric:
        return found
    packed = np.ascontiguousarray(_pack(zeros.T, codec.bits).T)
    return *found, PartData(packed, "I32")


@encode.register
def _bytes(codec: ScaledBytes, weight: Float32) -> tuple[PartData, ...]:
    if codec.kind == "fp8":
        grid = codec.scaling.grid(*weight.shape)
        usual = weight.shape[0] if len(grid) == 1 else 1, weight.shape[1]
        height, width = codec.scaling.block if codec.scaling.block[1] else usual
        codes, scales = _fp8_in_blocks(weight, height, width)
        return codes, PartData(scales.data.reshape(grid), "F32")
    integers, factors, zeros = _integers(codec.scaling, 8, weight)
    found = (PartData(integers.astype(np.int8), "I8"), PartData(factors, "F32"))
    return found if codec.scaling.symmetric else (*found, PartData(zeros.astype(np.int8), "I8"))


def _fp8_in_blocks(weight: Float32, height: int, width: int) -> tuple[PartData, PartData]:
    rows, columns = weight.shape
    peaks = np.maximum.reduceat(np.abs(weight), np.arange(0, rows, height), axis=0)
    peaks = np.maximum.reduceat(peaks, np.arange(0, columns, width), axis=1)
    scales = _factors(peaks / _E4M3[-1])
    wide = np.repeat(np.repeat(scales, height, 0)[:rows], width, 1)[:, :columns]
    return PartData(_nearest(_E4M3, weight / wide, sign=0x80), "F8_E4M3"), PartData(scales, "F32")


def _integers(scaling: Scaling, bits: int, weight: Float32) -> tuple[Integers, Float32, Integers]:
    """Codes [rows, columns], scales and zero points, integers from -2 ** (bits - 1) on."""
    rows, columns = weight.shape
    grid = scaling.grid(rows, columns)
    groups = weight.reshape(1, -1) if scaling.strategy == "tensor" else weight
    groups = groups.reshape(*(1, 1) if len(grid) == 1 else grid, -1)
    bottom, top = -(1 << bits - 1), (1 << bits - 1) - 1
    if scaling.symmetric:
        scales = _factors(np.abs(groups).max(-1) / top)
        zeros = np.zeros_like(scales)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = _factors((high - low) / (top - bottom))
        zeros = np.clip(np.rint(bottom - low / scales), bottom, top)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], bottom, top)
    whole = codes.reshape(rows, columns).astype(np.int64)
    return whole, scales.reshape(grid), zeros.reshape(grid).astype(np.int64)


def _pack(codes: Integers, bits: int) -> Array:
    """Rows of integers to rows of I32 words."""
    offset = (codes + (1 << bits - 1)).astype(np.uint8)
    padded = np.pad(offset, ((0, 0), (0, -offset.shape[1] % (32 // bits))))
    packed = padded if bits == 8 else _halves(padded)
    return np.ascontiguousarray(packed).view("<i4")


def _halves(codes: Bytes) -> Bytes:
    """Two codes of 4 bits in each byte, the first one low."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low + 16 * high).astype(np.uint8)


def _factors(scales: Numbers) -> Float32:
    """Scales, 1 where all is zero."""
    return np.where(scales > 0, scales, 1).astype(np.float32)


def _nearest(values: Float32, wanted: Numbers, sign: int) -> Bytes:
    """Codes of the values nearest to what is wanted, even ones if two are as near."""
    middle = (values[:-1] + values[1:]) / 2
    magnitude = np.abs(wanted)
    code = np.searchsorted(middle, magnitude)
    tie = magnitude == middle[np.minimum(code, len(middle) - 1)]
    code += tie & (code % 2 == 1)
    code += sign * np.signbit(wanted)
    return code.astype(np.uint8)
