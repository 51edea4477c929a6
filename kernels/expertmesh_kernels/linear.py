"""Linear layers with packed weights. R rows, K input features, N output features.

On CPU a row's bits depend on that row and the weights alone, never on the batch. Float32, float16
and, where there is no AMX, bfloat16: each output is one FP32 chain acc = fma(x[k], w[k], acc) in
ascending k from 0. Bfloat16 with AMX: the sums of TDPBF16PS, 32 features at a time. Then the bias
is added, and the result is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.formats.coded import CodedMatrix, CodeName
from expertmesh_kernels.cpu.amx import STEP
from expertmesh_kernels.cpu.codes import HEADER_BYTES, stored_type
from expertmesh_kernels.cpu.features import has_amx
from expertmesh_kernels.cpu.linear import linear as cpu_linear
from expertmesh_kernels.cpu.tile import HALF_PANEL, PANEL
from expertmesh_kernels.cpu.weight_memory import weight_memory
from expertmesh_kernels.host import LIKE, as_array
from expertmesh_kernels.packed_codes import pack_codes, unpack_codes

NO_BIAS = np.empty(0, np.float32)
"""As CPU kernels take it."""

Format = Literal["panels", "tiles"]
"""panels: [P, K, C], C = 64 on CPU, one panel elsewhere. tiles: for AMX, see `cpu.amx`. Codes are
[P, bytes] in both, and decoded to one or the other."""


@dataclass(frozen=True)
class PackedCodes:
    """What quantised weights consist of."""

    kind: CodeName
    group: int
    """Features that share a scale; 0 for all."""


@dataclass(frozen=True)
class PackedLinear:
    """Weights in the order in which the device reads them. Made by `pack_linear`."""

    weight: Tensor
    """Of the format, zero beyond row K and column N."""
    format: Format
    bias_N: Tensor | None
    in_features: int
    out_features: int
    paired: bool
    """Columns j and N / 2 + j are in one panel, 32 of each: for gate and up."""
    codes: PackedCodes | None = None
    """None for weights that are not quantised."""

    @property
    def weight_KN(self) -> Tensor:
        """The weights K-major without padding, as a copy."""
        panels = self._panels_PKC()
        depth = panels.shape[1]
        columns = panels.transpose(0, 1).reshape(depth, -1)[: self.in_features]
        if not self.paired:
            return columns[:, : self.out_features]
        pairs = columns.view(len(columns), -1, 2, HALF_PANEL).transpose(1, 2)
        halves = pairs.reshape(len(columns), 2, -1)[:, :, : self.out_features // 2]
        return halves.reshape(len(columns), -1)

    def _panels_PKC(self) -> Tensor:
        """Values of the panels, [P, K, C]; FP32 if there are codes."""
        if self.codes is not None:
            return unpack_codes(self.weight, self.codes.kind, self.codes.group, self.in_features)
        return _untiled(self.weight) if self.format == "tiles" else self.weight

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.weight.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    @cached_property
    def depth(self) -> int:
        """Features as packed: K, or the next multiple of 32 in tiles and of codes."""
        return padded_depth(self.in_features, self.format if self.codes is None else "tiles")

    @cached_property
    def panels(self) -> NDArray[np.generic]:
        """The weights as CPU kernels take them, flat; tiles as pairs of bfloat16."""
        flat = self.weight.view(-1)
        if self.codes is not None:
            dtype = stored_type(self.codes.kind, tiles=self.format == "tiles")
            return flat.numpy().view(dtype)
        if self.format == "tiles":
            return flat.view(torch.uint32).numpy()
        return as_array(flat)

    @cached_property
    def like(self) -> NDArray[np.generic]:
        """What tells kernels how weights are packed: the beginning, or none if the type does."""
        return self.panels[: 0 if self.codes is None else HEADER_BYTES]

    @cached_property
    def bias(self) -> NDArray[np.float32]:
        """The bias as CPU kernels take it: FP32, empty if there is none."""
        return NO_BIAS if self.bias_N is None else self.bias_N.float().numpy()


def pack_linear(
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    paired: bool = False,
    format: Format | None = None,
) -> PackedLinear:
    """Reorder a weight as PyTorch stores it; the input may be freed afterwards.

    Args:
        weight_NK: On the device that computes.
        bias_N: Bias or none.
        paired: See `PackedLinear`; on CPU only, elsewhere columns stay in order.
        format: None for the fastest on this machine.

    Raises:
        ValueError: The weight is not a matrix, or the bias does not fit it.
    """
    if weight_NK.ndim != 2:
        raise ValueError(f"weight has shape {tuple(weight_NK.shape)}, expected [out, in]")
    num_columns, depth = weight_NK.shape
    if bias_N is not None and bias_N.shape != (num_columns,):
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}, expected ({num_columns},)")
    is_cpu = weight_NK.device.type == "cpu"
    paired = paired and is_cpu
    if format is None:
        format = "tiles" if is_cpu and weight_NK.dtype == torch.bfloat16 and has_amx() else "panels"
    panels = _panels(weight_NK, PANEL if is_cpu else num_columns, paired=paired)
    ordered = _tiled(panels) if format == "tiles" else panels.transpose(1, 2)
    weight = _stored(ordered)
    bias_N = None if bias_N is None else bias_N.clone()
    return PackedLinear(weight, format, bias_N, depth, num_columns, paired)


def pack_coded_linear(
    matrix_NK: CodedMatrix,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype,
    paired: bool = False,
    format: Format | None = None,
) -> PackedLinear:
    """Reorder a quantised weight for the CPU; it stays quantised.

    Args:
        matrix_NK: Codes and scales.
        bias_N: Bias or none.
        dtype: Of the rows that it will be multiplied with.
        paired: See `PackedLinear`.
        format: None for the fastest on this machine.

    Raises:
        ValueError: The groups are not those of any kernel.
    """
    if format is None:
        format = "tiles" if dtype == torch.bfloat16 and has_amx() else "panels"
    packed = PackedCodes(matrix_NK.kind, matrix_NK.group)
    num_columns, depth = matrix_NK.codes.shape
    weight = _stored(pack_codes(matrix_NK, paired=paired))
    bias_N = None if bias_N is None else bias_N.clone()
    return PackedLinear(weight, format, bias_N, depth, num_columns, paired, packed)


def packed_like(codes: CodeName | None, dtype: torch.dtype) -> NDArray[np.generic]:
    """`PackedLinear.like` of weights on the CPU in the fastest format, but for what it says.

    Args:
        codes: How they are quantised; None for plain ones.
        dtype: Of the rows that they will be multiplied with.
    """
    is_tiled = dtype == torch.bfloat16 and has_amx()
    if codes is not None:
        return np.zeros(HEADER_BYTES, stored_type(codes, tiles=is_tiled))
    return np.empty(0, np.uint32) if is_tiled else LIKE[dtype]


def padded_depth(depth: int, format: Format) -> int:
    """Features as packed."""
    return -(-depth // STEP) * STEP if format == "tiles" else depth


def _panels(weight_NK: Tensor, width: int, *, paired: bool) -> Tensor:
    """Columns in panels, [P, C, K], the last one padded with zeros."""
    depth = weight_NK.shape[1]
    halves = weight_NK.view(2, -1, depth) if paired else weight_NK[None]
    part = width // len(halves)
    num_panels = -(-halves.shape[1] // part)
    padded = weight_NK.new_zeros(len(halves), num_panels * part, depth)
    padded[:, : halves.shape[1]] = halves
    panels = padded.view(len(halves), num_panels, part, depth).transpose(0, 1)
    return panels.reshape(num_panels, width, depth)


def _tiled(panels_PCK: Tensor) -> Tensor:
    """[P, 64, K] to [P, K / 32, 4, 16, 16, 2]: pairs of features by columns, tile by tile."""
    num_panels, _, depth = panels_PCK.shape
    padded = panels_PCK.new_zeros(num_panels, PANEL, padded_depth(depth, "tiles"))
    padded[:, :, :depth] = panels_PCK
    return padded.view(num_panels, 4, 16, -1, 16, 2).permute(0, 3, 1, 4, 2, 5)


def _stored(weight: Tensor) -> Tensor:
    """A contiguous copy where it is read fast."""
    if weight.device.type != "cpu":
        return weight.contiguous()
    return weight_memory.empty(weight.shape, weight.dtype).copy_(weight)


def _untiled(tiles: Tensor) -> Tensor:
    """The other way, to [P, K, 64]."""
    return tiles.permute(0, 1, 3, 5, 2, 4).reshape(len(tiles), -1, PANEL)


def linear(x_RK: Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight + bias, [R, N]; R may be 0.

    Args:
        x_RK: Any floating dtype; that of the weights if they are in tiles.
        packed: Weights on the device of `x_RK`, not paired.
        out_dtype: Dtype of the result; that of `x_RK` if None.
    """
    if packed.paired:
        raise ValueError("columns are paired for a gated FFN, expected them in order")
    if x_RK.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_linear(x_RK, packed, out_dtype)
    if x_RK.device.type != "cpu":
        return linear_reference(x_RK, packed, out_dtype=out_dtype)
    num_rows, depth = x_RK.shape
    if depth != packed.in_features:
        raise ValueError(f"x has {depth} features, expected {packed.in_features}")
    out_RN = torch.empty(num_rows, packed.out_features, dtype=out_dtype or x_RK.dtype)
    x_RK = _as_multiplied(x_RK, packed)
    cpu_linear(
        x_RK.data_ptr(), LIKE[x_RK.dtype], x_RK.stride(0), num_rows, packed.panels, packed.depth,
        packed.bias, out_RN.data_ptr(), LIKE[out_RN.dtype], packed.out_features,
    )  # fmt: skip
    return out_RN


def _as_multiplied(x_RK: Tensor, packed: PackedLinear) -> Tensor:
    """Rows as the kernel reads them, adjacent inside: FP32, or bfloat16 padded to whole steps."""
    if x_RK.stride(1) != 1:
        x_RK = x_RK.contiguous()
    if packed.format == "panels":
        return x_RK.float()
    if x_RK.dtype != torch.bfloat16:
        raise ValueError(f"x is {x_RK.dtype}, expected torch.bfloat16 as the weights are in tiles")
    missing = packed.depth - packed.in_features
    return torch.nn.functional.pad(x_RK, (0, missing)) if missing else x_RK


def linear_reference(
    x_RK: Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What `linear` computes, in PyTorch and FP32; any summation order."""
    out_RN = x_RK.float() @ packed.weight_KN.float()
    if packed.bias_N is not None:
        out_RN = out_RN + packed.bias_N.float()
    return out_RN.to(out_dtype or x_RK.dtype)
