"""Quantised weights as files store them, kept quantised on a CUDA device.

What a codec decodes to in FP32 is what kernels expand such a weight to, before they round it to the
type of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor

from expertmesh.formats.codec import Codec, PartData, factors
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.host_tensor import Array
from expertmesh_kernels.triton.weights import (
    FP8_BLOCK,
    DeviceWeight,
    pack_fp8,
    pack_integers,
    pack_mxfp4,
)


@singledispatch
def device_weight(
    codec: Codec, parts: Sequence[PartData], device: torch.device, bias_N: Tensor | None = None
) -> DeviceWeight:
    """A matrix [N, K] in the stored tensors `codec.parts`, for kernels.

    Args:
        codec: Of the weight.
        parts: As read, of one matrix.
        device: Where to.
        bias_N: On that device.

    Raises:
        ValueError: Kernels do not expand this format; the weight has to be decoded when read.
    """
    raise ValueError(f"{codec.name} cannot be kept quantised on a device")


@device_weight.register
def _fp8(
    codec: Fp8Blocks, parts: Sequence[PartData], device: torch.device, bias_N: Tensor | None = None
) -> DeviceWeight:
    if (codec.block_rows, codec.block_columns) != (FP8_BLOCK, FP8_BLOCK):
        raise ValueError(f"{codec.name} cannot be kept quantised on a device")
    codes, scales = parts
    return pack_fp8(_bytes(codes.data, device), _floats(scales, device), bias_N)


@device_weight.register
def _mxfp4(
    _codec: Mxfp4, parts: Sequence[PartData], device: torch.device, bias_N: Tensor | None = None
) -> DeviceWeight:
    codes, scales = parts
    return pack_mxfp4(_bytes(codes.data, device), _bytes(scales.data, device), bias_N)


@device_weight.register
def _packed(
    codec: PackedIntegers,
    parts: Sequence[PartData],
    device: torch.device,
    bias_N: Tensor | None = None,
) -> DeviceWeight:
    _check(codec.scaling, codec)
    words, scales, shape, *zero_points = parts
    rows, columns = shape.data.tolist()
    offset = 1 << (codec.bits - 1)
    codes = _unpacked(words.data, codec.bits, device)[:, :columns] - offset
    zeros = None
    if zero_points:
        by_group = np.ascontiguousarray(zero_points[0].data.T)
        zeros = _unpacked(by_group, codec.bits, device)[:, :rows].T - offset
    return pack_integers(4 if codec.bits == 4 else 8, codes, _floats(scales, device), zeros, bias_N)


@device_weight.register
def _scaled(
    codec: ScaledBytes,
    parts: Sequence[PartData],
    device: torch.device,
    bias_N: Tensor | None = None,
) -> DeviceWeight:
    _check(codec.scaling, codec)
    if codec.kind != "int8":
        raise ValueError(f"{codec.name} cannot be kept quantised on a device")
    codes, scales, *zero_points = parts
    zeros = _copied(zero_points[0].data, device) if zero_points else None
    return pack_integers(8, _copied(codes.data, device), _floats(scales, device), zeros, bias_N)


def _check(scaling: Scaling, codec: Codec) -> None:
    if scaling.strategy not in ("channel", "group"):
        raise ValueError(f"{codec.name} cannot be kept quantised on a device")


def _unpacked(words: Array, bits: int, device: torch.device) -> Tensor:
    """Rows of words to rows of integers, the first one in the lowest bits."""
    codes = _bytes(words, device)
    if bits == 8:
        return codes.int()
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()


def _bytes(data: Array, device: torch.device) -> Tensor:
    return _copied(data.view(np.uint8), device)


def _floats(part: PartData, device: torch.device) -> Tensor:
    return _copied(factors(part), device)


def _copied(data: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(data)).to(device)
