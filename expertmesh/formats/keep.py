"""Which stored formats kernels multiply with as they are, and their matrices without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np

from expertmesh.formats.codec import Codec, PartData, factors
from expertmesh.formats.coded import CodedMatrix, CodeName
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import BLOCK, Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.host_tensor import Array, Float32

GROUP_STEP = 32
"""Kernels take groups of so many columns or a multiple."""


@dataclass(frozen=True)
class Coding:
    """How kernels get a matrix."""

    kind: CodeName
    group: int
    """Columns that share a scale; 0 for all."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind} {f'in groups of {self.group}' if self.group else 'per channel'}"


@singledispatch
def coding_of(codec: Codec) -> Coding | None:
    """How kernels get matrices of a format; None if none takes it as it is."""
    return None


@singledispatch
def keep(codec: Codec, parts: Sequence[PartData], rows: int, columns: int) -> CodedMatrix:
    """The matrix of a format that has a coding, in the order of the codec's parts."""
    raise TypeError(f"no kernel multiplies with {codec.name}")


def _grouped(kind: CodeName, group: int) -> Coding | None:
    return None if group % GROUP_STEP else Coding(kind, group)


def _scaled(kind: CodeName, scaling: Scaling) -> Coding | None:
    return _grouped(kind, scaling.block[1] if scaling.strategy in ("group", "block") else 0)


def _scales(scaling: Scaling, stored: Float32, rows: int) -> Float32:
    """[rows, groups], whatever shares a scale."""
    if scaling.strategy == "block":
        return np.repeat(stored, scaling.block[0], 0)[:rows]
    return np.ascontiguousarray(np.broadcast_to(stored.reshape(-1, stored.shape[-1]), (
        rows, stored.shape[-1],
    )))  # fmt: skip


@coding_of.register
def _coding_of_fp8(codec: Fp8Blocks) -> Coding | None:
    return _grouped("fp8", codec.block_columns)


@keep.register
def _keep_fp8(codec: Fp8Blocks, parts: Sequence[PartData], rows: int, columns: int) -> CodedMatrix:
    codes, scales = parts
    wide = np.repeat(factors(scales), codec.block_rows, 0)[:rows]
    return CodedMatrix("fp8", _bytes(codes.data), wide, codec.block_columns)


@coding_of.register
def _coding_of_mxfp4(_codec: Mxfp4) -> Coding | None:
    return Coding("mxfp4", BLOCK)


@keep.register
def _keep_mxfp4(_codec: Mxfp4, parts: Sequence[PartData], rows: int, columns: int) -> CodedMatrix:
    codes, scales = parts
    return CodedMatrix("mxfp4", _nibbles(codes.data, rows, columns), factors(scales), BLOCK)


@coding_of.register
def _coding_of_packed(codec: PackedIntegers) -> Coding | None:
    if codec.bits == 4:
        return _scaled("int4", codec.scaling)
    return _scaled("int8", codec.scaling) if codec.scaling.symmetric else None


@keep.register
def _keep_packed(
    codec: PackedIntegers, parts: Sequence[PartData], rows: int, columns: int
) -> CodedMatrix:
    words, scales, shape, *zero_points = parts
    if shape.data.tolist() != [rows, columns]:
        raise ValueError(f"_shape: expected {[rows, columns]}, found {shape.data.tolist()}")
    coding = coding_of(codec)
    assert coding is not None, codec.name
    wide = _scales(codec.scaling, factors(scales), rows)
    if codec.bits == 8:
        codes = words.data.view(np.uint8).reshape(rows, -1)[:, :columns] ^ np.uint8(0x80)
        return CodedMatrix("int8", codes, wide, coding.group)
    zeros = None
    if zero_points:
        packed = np.ascontiguousarray(zero_points[0].data.T)
        zeros = _nibbles(packed, len(packed), rows).T
    return CodedMatrix("int4", _nibbles(words.data, rows, columns), wide, coding.group, zeros)


@coding_of.register
def _coding_of_bytes(codec: ScaledBytes) -> Coding | None:
    return _scaled(codec.kind, codec.scaling) if codec.scaling.symmetric else None


@keep.register
def _keep_bytes(
    codec: ScaledBytes, parts: Sequence[PartData], rows: int, columns: int
) -> CodedMatrix:
    coding = coding_of(codec)
    assert coding is not None, codec.name
    wide = _scales(codec.scaling, factors(parts[1]), rows)
    return CodedMatrix(codec.kind, _bytes(parts[0].data), wide, coding.group)


def _bytes(data: Array) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return data.view(np.uint8)


def _nibbles(
    data: Array, rows: int, columns: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Two codes of a byte, low one first."""
    packed = data.view(np.uint8).reshape(rows, -1)
    return np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1)[:, :columns]
