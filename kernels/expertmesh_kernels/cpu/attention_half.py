"""The attention half of a decoder layer in one call: no Python between its products.

    x += o(attention(rope(norm(qkv(h)))));  h = rms_norm(x)

Each step is the kernel that also runs alone, on the same values: so are the bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.attention import Scores, attend
from expertmesh_kernels.cpu.block import gather_row, new_rows
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.linear import multiply_panels
from expertmesh_kernels.cpu.memory import FLOATS, array_at, optional_floats
from expertmesh_kernels.cpu.norm import add_norm_rows, rms_norm
from expertmesh_kernels.cpu.pages import Pages, pages_of, pool_of, write_row
from expertmesh_kernels.cpu.rope import apply_rope
from expertmesh_kernels.cpu.team import parallel_for

_GATHERED_ROWS = 64
"""Rows of a chunk of the gathering."""
_EDITED_ROWS = 8
"""Rows of a chunk of what is done to heads."""


class Half(NamedTuple):
    """What a layer consists of: addresses of arrays and their elements, shapes, options."""

    hidden: int
    qkv_at: int
    qkv_size: int
    qkv_depth: int
    """Features as packed."""
    qkv_columns: int
    qkv_bias_at: int
    """Of FP32; 0 if there is none, as with all that a layer may lack."""
    q_norm_at: int
    q_norm_size: int
    """Elements that are normalised together, a head's or all of a row."""
    k_norm_at: int
    k_norm_size: int
    cos_at: int
    sin_at: int
    num_positions: int
    num_pairs: int
    """Of a head that are rotated."""
    is_interleaved: int
    num_heads: int
    value_dim: int
    window: int
    sinks_at: int
    o_at: int
    o_size: int
    o_depth: int
    o_bias_at: int
    norm_at: int
    heads_round_first: int
    round_first: int


class Numbers(NamedTuple):
    """The options that are fractions."""

    scale: np.float32
    softcap: np.float32
    heads_eps: np.float32
    eps: np.float32


@njit
def half_of(fields: NDArray[np.int64]) -> Half:
    """From an array of the fields: one argument instead of many."""
    f = fields
    return Half(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13],
        f[14], f[15], f[16], f[17], f[18], f[19], f[20], f[21], f[22], f[23], f[24], f[25],
    )  # fmt: skip


@njit
def attention_half(
    x_address: int,
    h_address: int,
    like: NDArray[np.generic],
    like_panels: NDArray[np.generic],
    form: NDArray[np.generic],
    fields: NDArray[np.int64],
    numbers: NDArray[np.float32],
    layer: NDArray[np.integer],
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    slots_T: NDArray[np.int64],
) -> None:
    """The residual stream after attention and what the FFN reads, both in place.

    Args:
        x_address: Of the residual stream, contiguous rows.
        h_address: Of what attention reads, contiguous rows; takes what the FFN reads.
        like: An empty array of the type of rows and pages.
        like_panels: An empty array of the type of packed weights.
        form: See `paged_attention`.
        fields: Those of `Half`.
        numbers: Those of `Numbers`.
        layer: Those of `Pages`.
        block_tables_SB: Blocks of each sequence in order.
        sequence_of_row_T: Row of `block_tables_SB`.
        positions_T: Position of each row.
        slots_T: block * block_size + offset of each row.
    """
    half, pages = half_of(fields), pages_of(layer)
    options = Numbers(numbers[0], numbers[1], numbers[2], numbers[3])
    num_rows = positions_T.size
    x = array_at(x_address, num_rows * half.hidden, like)
    h = array_at(h_address, num_rows * half.hidden, like)
    qkv = np.empty(num_rows * half.qkv_columns, like.dtype)
    panels = array_at(half.qkv_at, half.qkv_size, like_panels)
    bias = optional_floats(half.qkv_bias_at, half.qkv_columns)
    _project(h, half.hidden, num_rows, panels, half.qkv_depth, bias, qkv, half.qkv_columns)
    parallel_for(
        _edit_chunk,
        (qkv, half, options, pages, positions_T, slots_T),
        -(-num_rows // _EDITED_ROWS),
    )
    width = half.num_heads * half.value_dim
    mixed = np.empty(num_rows * width, like.dtype)
    attend(
        qkv, half.qkv_columns, mixed, form, pages, block_tables_SB, sequence_of_row_T,
        positions_T, half.num_heads, half.value_dim,
        Scores(options.scale, half.window, options.softcap),
        optional_floats(half.sinks_at, half.num_heads),
    )  # fmt: skip
    out = np.empty(num_rows * half.hidden, like.dtype)
    panels = array_at(half.o_at, half.o_size, like_panels)
    bias = optional_floats(half.o_bias_at, half.hidden)
    _project(mixed, width, num_rows, panels, half.o_depth, bias, out, half.hidden)
    weight = array_at(half.norm_at, half.hidden, FLOATS)
    add_norm_rows((x, out, x, h), weight, options.eps, half.round_first != 0)


@njit
def _project(
    x: NDArray[np.generic],
    width: int,
    num_rows: int,
    panels: NDArray[np.generic],
    depth: int,
    bias: NDArray[np.float32],
    out: NDArray[np.generic],
    num_columns: int,
) -> None:
    """A linear layer on stored rows."""
    rows = new_rows(panels, num_rows * depth)
    parallel_for(_gather_chunk, (x, width, rows, depth), -(-num_rows // _GATHERED_ROWS))
    multiply_panels(rows, depth, num_rows, panels, depth, bias, out, num_columns)


@njit
def _gather_chunk(
    x: NDArray[np.generic], width: int, rows: NDArray[np.generic], depth: int, chunk: int
) -> None:
    first = chunk * _GATHERED_ROWS
    for r in range(first, min(first + _GATHERED_ROWS, rows.size // depth)):
        gather_row(x[r * width : (r + 1) * width], rows[r * depth : (r + 1) * depth])


@njit
def _edit_chunk(
    qkv: NDArray[np.generic],
    half: Half,
    options: Numbers,
    pages: Pages,
    positions_T: NDArray[np.int32],
    slots_T: NDArray[np.int64],
    chunk: int,
) -> None:
    """Norms and rotation of queries and keys of some rows; keys and values to their pages."""
    first = chunk * _EDITED_ROWS
    last = min(first + _EDITED_ROWS, positions_T.size)
    stride = half.qkv_columns
    rows = qkv[first * stride : last * stride]
    count = last - first
    q_size = half.num_heads * pages.key_dim
    k_size = pages.num_heads * pages.key_dim
    _norm_parts(rows, count, stride, q_size, half.q_norm_at, half.q_norm_size, half, options)
    keys = rows[q_size:]
    _norm_parts(keys, count, stride, k_size, half.k_norm_at, half.k_norm_size, half, options)
    shape = (half.num_positions, half.num_pairs)
    size = half.num_positions * half.num_pairs
    apply_rope(
        rows, (stride, pages.key_dim), half.num_heads + pages.num_heads, positions_T[first:last],
        array_at(half.cos_at, size, FLOATS).reshape(shape),
        array_at(half.sin_at, size, FLOATS).reshape(shape),
        half.is_interleaved != 0,
    )  # fmt: skip
    pool = pool_of(pages, qkv)
    for r in range(count):
        k_at = r * stride + q_size
        write_row(rows, k_at, rows, k_at + k_size, pool, pages, slots_T[first + r])


@njit
def _norm_parts(
    x: NDArray[np.generic],
    count: int,
    stride: int,
    size: int,
    weight_at: int,
    width: int,
    half: Half,
    options: Numbers,
) -> None:
    """The first `size` elements of each row, normalised in parts, if there is a weight for it."""
    if weight_at != 0:
        weight = array_at(weight_at, width, FLOATS)
        shape = (count, size // width)
        rms_norm(
            x, x, (stride, width), shape, weight, options.heads_eps, half.heads_round_first != 0
        )
