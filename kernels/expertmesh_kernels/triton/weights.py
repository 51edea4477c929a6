"""Weights on CUDA devices: plain, or quantised and expanded inside the loop over k.

N columns, K depth, E experts. All are K-major, so that neighbouring columns are read together.

A quantised weight is expanded as when it is read from a file: (code - zero) * scale in FP32,
rounded once to the type of the rows. So a product has the value that it would have with the
expanded weight.

Codes of 4 bits lie side by side with those 32 steps of k further on: byte [32 a + b, n] holds the
codes of k = 64 a + b and, in its upper half, of k = 64 a + b + 32. Then each half of a byte is a
contiguous run of k, as rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import device, narrow

Format = Literal["plain", "int8", "int4", "fp8", "mxfp4"]

STEP = 64
"""Steps of k that a turn of the loop takes of quantised weights, and K is padded to."""
HALF = STEP // 2
FP8_BLOCK = 128
MX_GROUP = 32
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


@dataclass(frozen=True)
class DeviceWeight:
    """A weight [K, N] in one of the formats. Quantised ones are made by `pack_...` below."""

    format: Format
    data: Tensor
    """Contiguous: values or codes [K, N]; of 4 bits [K / 2, N]. Codes are uint8, K padded."""
    columns: int
    depth: int
    scales: Tensor | None = None
    """float32 [groups, N]; of fp8 [K blocks, N blocks]; of mxfp4 uint8 exponents [groups, N]."""
    zeros: Tensor | None = None
    """float32 [groups, N]: code that stands for 0, if it is not the usual one."""
    group: int = 0
    """Steps of k that share a scale."""
    bias: Tensor | None = None
    """[N]."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        parts = (self.data, self.scales, self.zeros, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights of one table have in common."""
        return (
            self.format, self.data.dtype, self.columns, self.depth, self.group,
            self.zeros is not None, None if self.bias is None else self.bias.dtype,
        )  # fmt: skip

    @property
    def pointers(self) -> list[int]:
        """Where data, scales, zeros and bias are; 0 for what is not there."""
        parts = (self.data, self.scales, self.zeros, self.bias)
        return [0 if part is None else part.data_ptr() for part in parts]


@dataclass(frozen=True)
class WeightTable:
    """Where the weights of experts are. Contents may change while a CUDA graph refers to it."""

    pointers_E4: Tensor
    """int64."""
    like: DeviceWeight
    """One of them: all have its format, shape and dtypes."""

    @property
    def options(self) -> dict[str, object]:
        """As kernels take it."""
        like, bias = self.like, self.like.bias
        return {
            "FORMAT": like.format,
            "GROUP": like.group,
            "HAS_ZEROS": like.zeros is not None,
            "HAS_BIAS": bias is not None,
            "DTYPE": _TRITON_DTYPES[like.data.dtype],
            "BIAS_DTYPE": tl.float32 if bias is None else _TRITON_DTYPES[bias.dtype],
        }


def table_of(
    weights: Sequence[DeviceWeight] | Mapping[int, DeviceWeight], size: int | None = None
) -> WeightTable:
    """A table of experts' weights, which the caller must keep.

    Args:
        weights: By place.
        size: Places; as many as weights if None. Those without a weight must not be asked for.

    Raises:
        ValueError: They are not of one kind, or there is none.
    """
    by_place = weights if isinstance(weights, Mapping) else dict(enumerate(weights))
    kinds = {weight.kind for weight in by_place.values()}
    if len(kinds) != 1:
        raise ValueError(f"weights of {len(kinds)} kinds, expected one: {sorted(map(str, kinds))}")
    pointers = torch.zeros(len(by_place) if size is None else size, 4, dtype=torch.int64)
    for place, weight in by_place.items():
        pointers[place] = torch.tensor(weight.pointers)
    if bool((pointers % 16).any()):
        raise ValueError("weights that do not begin at multiples of 16 bytes")
    like = next(iter(by_place.values()))
    return WeightTable(pointers.to(like.data.device), like)


def plain(weight_KN: Tensor, bias_N: Tensor | None = None) -> DeviceWeight:
    """A weight as it is; contiguous."""
    depth, columns = weight_KN.shape
    return DeviceWeight("plain", weight_KN, columns, depth, bias=bias_N)


def pack_integers(
    bits: Literal[4, 8],
    codes_NK: Tensor,
    scales_NG: Tensor,
    zeros_NG: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> DeviceWeight:
    """Integers with a scale, and perhaps a zero point, per group of k.

    Args:
        bits: Of a code.
        codes_NK: Integers from -2 ** (bits - 1) on, any integer dtype.
        scales_NG: G groups of equally many steps of k, or 1.
        zeros_NG: Integers, likewise.
        bias_N: Any floating dtype.

    Raises:
        ValueError: Groups are not equal multiples of 16.
    """
    columns, depth = codes_NK.shape
    groups = scales_NG.shape[1]
    group = depth // groups if groups > 1 else -(-depth // STEP) * STEP
    if group % 16 or (groups > 1 and group * groups != depth):
        raise ValueError(f"{groups} groups of {depth} inputs, expected multiples of 16")
    offset = 128 if bits == 8 else 8
    codes_KN = _padded(codes_NK.T.to(torch.int32) + offset, offset).to(torch.uint8)
    return DeviceWeight(
        "int8" if bits == 8 else "int4",
        codes_KN if bits == 8 else _halves(codes_KN),
        columns,
        depth,
        _whole_steps(scales_NG.T.float(), group, depth),
        None if zeros_NG is None else _whole_steps(zeros_NG.T.float() + offset, group, depth),
        group,
        bias_N,
    )


def pack_fp8(codes_NK: Tensor, scales: Tensor, bias_N: Tensor | None = None) -> DeviceWeight:
    """E4M3 with a scale per block of 128 x 128.

    Args:
        codes_NK: uint8, or torch's float8_e4m3fn.
        scales: [ceil(N / 128), ceil(K / 128)].
        bias_N: Any floating dtype.
    """
    columns, depth = codes_NK.shape
    codes_KN = _padded(codes_NK.view(torch.uint8).T, 0)
    scales_KN = scales.T.float().contiguous()
    return DeviceWeight("fp8", codes_KN, columns, depth, scales_KN, group=FP8_BLOCK, bias=bias_N)


def pack_mxfp4(blocks: Tensor, scales_NG: Tensor, bias_N: Tensor | None = None) -> DeviceWeight:
    """E2M1 with a power of two per 32 steps of k, as gpt-oss stores it.

    Args:
        blocks: uint8 [N, K / 32, 16], two codes a byte, the first one low.
        scales_NG: uint8 [N, K / 32]: exponents with 127 added.
        bias_N: Any floating dtype.
    """
    columns, depth = blocks.shape[0], blocks.shape[1] * MX_GROUP
    codes_NK = torch.stack([blocks & 15, blocks >> 4], -1).reshape(columns, depth)
    data = _halves(_padded(codes_NK.T, 0))
    scales_GN = _whole_steps(scales_NG.T, MX_GROUP, depth)
    return DeviceWeight("mxfp4", data, columns, depth, scales_GN, group=MX_GROUP, bias=bias_N)


def _whole_steps(factors_GN: Tensor, group: int, depth: int) -> Tensor:
    """Factors also for the steps that the depth is padded with."""
    wanted = -(-(depth + -depth % STEP) // group)
    missing = wanted - factors_GN.shape[0]
    return torch.nn.functional.pad(factors_GN, (0, 0, 0, missing)).contiguous()


def _padded(codes_KN: Tensor, value: int) -> Tensor:
    missing = -codes_KN.shape[0] % STEP
    return torch.nn.functional.pad(codes_KN, (0, 0, 0, missing), value=value).contiguous()


def _halves(codes_KN: Tensor) -> Tensor:
    low, high = codes_KN.view(-1, 2, HALF, codes_KN.shape[1]).unbind(1)
    return (low | (high << 4)).reshape(-1, codes_KN.shape[1]).contiguous()


@device
def e4m3(codes: tl.tensor) -> tl.tensor:
    """FP8 E4M3 in FP32: its bits are those of a float16 of 2 ** -8 times the value."""
    bits = codes.to(tl.uint16)
    half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@device
def e2m1(codes: tl.tensor) -> tl.tensor:
    """FP4 E2M1 in FP32: its bits are those of a float16 of 2 ** -14 times the value."""
    bits = codes.to(tl.uint16)
    half = ((bits & 7) << 9) | ((bits & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@device
def power_of_two(exponents: tl.tensor) -> tl.tensor:
    """2 ** (byte - 127) in FP32; byte 255 is NaN, and 0 is subnormal."""
    bits = exponents.to(tl.uint32) << 23
    bits = tl.where(exponents == 0, 0x00400000, tl.where(exponents == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@device
def load_factors(
    ptr: tl.tensor, k: tl.tensor, columns: tl.tensor, mask: tl.tensor, N: tl.tensor,
    GROUP: tl.constexpr, LENGTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[1 or LENGTH, columns] of [groups, N]: those of the LENGTH steps from k on."""
    if GROUP % LENGTH == 0:
        factors = tl.load(ptr + (k // GROUP) * N + columns, mask=mask, other=0)[None, :]
    else:
        groups = (k + tl.arange(0, LENGTH)) // GROUP
        factors = tl.load(ptr + groups[:, None] * N + columns[None, :], mask=mask[None, :], other=0)
    return factors


@device
def expand(
    codes: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor, k: tl.tensor,
    columns: tl.tensor, mask: tl.tensor, N: tl.tensor,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, LENGTH: tl.constexpr,
    OUT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Weights [LENGTH, columns] from step k on, out of their codes."""
    if FORMAT == "fp8":
        row = (k // 128) * ((N + 127) // 128)
        wide = e4m3(codes) * tl.load(scale_ptr + row + columns // 128, mask=mask, other=0)[None, :]
    elif FORMAT == "mxfp4":
        exponents = load_factors(scale_ptr, k, columns, mask, N, GROUP, LENGTH)
        wide = e2m1(codes) * power_of_two(exponents)
    else:
        scales = load_factors(scale_ptr, k, columns, mask, N, GROUP, LENGTH)
        if HAS_ZEROS:
            zeros = load_factors(zero_ptr, k, columns, mask, N, GROUP, LENGTH)
            wide = (codes.to(tl.float32) - zeros) * scales
        elif FORMAT == "int8":
            wide = (codes.to(tl.float32) - 128.0) * scales
        else:
            wide = (codes.to(tl.float32) - 8.0) * scales
    return narrow(wide, OUT)
