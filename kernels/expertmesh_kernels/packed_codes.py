"""Quantised matrices in the order in which CPU kernels read them; see `cpu.codes`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.formats.coded import INT4_ZERO, CodedMatrix, CodeName
from expertmesh_kernels.cpu.code_vectors import LARGEST_OFFSET
from expertmesh_kernels.cpu.codes import (
    CODE_BITS,
    HEADER_BYTES,
    OFFSET_BYTES,
    SCALE_BYTES,
    STEP,
    group_overhead,
)
from expertmesh_kernels.cpu.tile import PANEL

_HALF = PANEL // 2
_TILES, _PAIRS, _LANES = 4, 16, 16


def can_pack(matrix: CodedMatrix) -> bool:
    """Whether kernels take it: groups are whole steps of 32 columns, or there is one group."""
    return matrix.group % STEP == 0


def packed_depth(columns: int) -> int:
    """Columns with those that are padded."""
    return -(-columns // STEP) * STEP


def panel_nbytes(codes: CodeName, columns: int, group: int) -> int:
    """Bytes of a panel.

    Args:
        codes: Kind of codes.
        columns: Of the matrix, padded or not.
        group: Columns of a group; 0 for all.
    """
    depth = packed_depth(columns)
    num_groups = -(-depth // (group or depth))
    return HEADER_BYTES + num_groups * group_overhead(codes) + depth * PANEL * CODE_BITS[codes] // 8


def pack_codes(matrix: CodedMatrix, *, paired: bool) -> Tensor:
    """Panels, uint8 [P, bytes].

    Args:
        matrix: Codes [out, in] that can be packed.
        paired: Rows j and N / 2 + j are in one panel, 32 of each.

    Raises:
        ValueError: The groups cannot be packed.
    """
    if not can_pack(matrix):
        raise ValueError(f"groups of {matrix.group} columns, expected a multiple of {STEP}")
    depth, kind = packed_depth(matrix.num_columns), matrix.kind
    codes_PCK = _panels(matrix.codes, paired=paired)
    padded = np.zeros((len(codes_PCK), PANEL, depth), np.uint8)
    padded[:, :, : matrix.num_columns] = codes_PCK
    group = matrix.group
    steps_PS = _step_bytes(padded, kind)
    packed = np.zeros((len(padded), panel_nbytes(kind, depth, group)), np.uint8)
    packed[:, :8] = np.array([group], np.int64).view(np.uint8)
    scales_PCG = _panels(matrix.scales, paired=paired)
    offsets_PCG = _panels(_offsets(matrix), paired=paired)
    at, per_group = HEADER_BYTES, (group or depth) // STEP
    for index, first in enumerate(range(0, depth // STEP, per_group)):
        scales = np.ascontiguousarray(scales_PCG[:, :, index]).view(np.uint8)
        packed[:, at : at + SCALE_BYTES] = scales
        if kind == "int4":
            packed[:, at + SCALE_BYTES : at + SCALE_BYTES + OFFSET_BYTES] = offsets_PCG[:, :, index]
        at += group_overhead(kind)
        codes = steps_PS[:, first : first + per_group].reshape(len(packed), -1)
        packed[:, at : at + codes.shape[1]] = codes
        at += codes.shape[1]
    return torch.from_numpy(packed)


def _offsets(matrix: CodedMatrix) -> NDArray[np.uint8]:
    if matrix.zeros is None:
        return np.full(matrix.scales.shape, LARGEST_OFFSET - INT4_ZERO, np.uint8)
    return (LARGEST_OFFSET - matrix.zeros).astype(np.uint8)


def _panels(rows_NK: NDArray[np.generic], *, paired: bool) -> NDArray[np.generic]:
    """Rows in panels, [P, 64, K], the last one padded with zeros."""
    parts = np.split(rows_NK, 2) if paired else [rows_NK]
    width = PANEL // len(parts)
    num_panels = -(-len(parts[0]) // width)
    panels = np.zeros((num_panels, PANEL, rows_NK.shape[1]), rows_NK.dtype)
    for index, part in enumerate(parts):
        for panel in range(num_panels):
            found = part[panel * width : (panel + 1) * width]
            panels[panel, index * width : index * width + len(found)] = found
    return panels


def _step_bytes(codes_PCK: NDArray[np.uint8], kind: CodeName) -> NDArray[np.uint8]:
    """[P, steps, bytes] in the order of `cpu.codes`."""
    num_panels = len(codes_PCK)
    lines = codes_PCK.reshape(num_panels, _TILES, _LANES, -1, _PAIRS, 2)
    lines = lines.transpose(0, 3, 1, 4, 2, 5)  # [P, steps, tiles, pairs, lanes, 2]
    front = lines.shape[:3]
    if kind == "int8":
        ordered = lines.transpose(0, 1, 2, 3, 5, 4)
    elif kind == "fp8":
        ordered = lines.reshape(*front, _PAIRS // 2, 2, _LANES, 2).transpose(0, 1, 2, 3, 5, 6, 4)
    else:
        quads = lines.reshape(*front, _PAIRS // 4, 4, _LANES, 2).transpose(0, 1, 2, 3, 5, 6, 4)
        ordered = quads[..., 0::2] | (quads[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(ordered).reshape(num_panels, lines.shape[1], -1)


def unpack_codes(packed: Tensor, kind: CodeName, group: int, columns: int) -> Tensor:
    """Values of the panels, FP32 [P, padded columns, 64]."""
    bytes_PB, depth = packed.numpy(), packed_depth(columns)
    num_panels = len(bytes_PB)
    values = np.empty((num_panels, PANEL, depth), np.float32)
    at, size = HEADER_BYTES, group or depth
    for first in range(0, depth, size):
        count = min(size, depth - first)
        num_bytes = count * PANEL * CODE_BITS[kind] // 8
        scales = bytes_PB[:, at : at + SCALE_BYTES].view(np.float32)
        zeros = LARGEST_OFFSET - bytes_PB[:, at + SCALE_BYTES : at + SCALE_BYTES + OFFSET_BYTES]
        at += group_overhead(kind)
        codes = _step_codes(bytes_PB[:, at : at + num_bytes], kind)
        matrix = CodedMatrix(
            kind, codes.reshape(-1, count), scales.reshape(-1, 1), 0, zeros.reshape(-1, 1)
        )
        values[:, :, first : first + count] = matrix.decoded().reshape(num_panels, PANEL, count)
        at += num_bytes
    return torch.from_numpy(values).transpose(1, 2)


def _step_codes(steps_PB: NDArray[np.uint8], kind: CodeName) -> NDArray[np.uint8]:
    """The other way, to codes [P, 64, K]."""
    front = (len(steps_PB), -1, _TILES)
    if kind == "int8":
        lines = steps_PB.reshape(*front, _PAIRS, 2, _LANES).transpose(0, 1, 2, 3, 5, 4)
    elif kind == "fp8":
        pairs = steps_PB.reshape(*front, _PAIRS // 2, _LANES, 2, 2)
        lines = pairs.transpose(0, 1, 2, 3, 6, 4, 5)
    else:
        quads = steps_PB.reshape(*front, _PAIRS // 4, _LANES, 2, 2)
        both = np.stack([quads & 15, quads >> 4], -1).reshape(*quads.shape[:-1], 4)
        lines = both.transpose(0, 1, 2, 3, 6, 4, 5)
    lines = lines.reshape(len(steps_PB), -1, _TILES, _PAIRS, _LANES, 2)
    codes = lines.transpose(0, 2, 4, 1, 3, 5)  # [P, tiles, lanes, steps, pairs, 2]
    return np.ascontiguousarray(codes).reshape(len(steps_PB), PANEL, -1)
