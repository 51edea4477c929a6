"""Rotary position embedding on CUDA devices. T rows, n heads, D head size, L positions."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import kernel, narrow, next_power

_HEADS = 4
"""Heads of a program, so that it has enough to do."""


@kernel()
def _apply_rope(
    x_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + pair, mask=pair < half, other=0)
    sin = tl.load(sin_ptr + position * half + pair, mask=pair < half, other=0)
    x_ptr += row * row_stride + head * head_stride
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else pair + half
    mask = (head < num_heads) & (pair < half)
    a = tl.load(x_ptr + first_at, mask=mask, other=0)
    b = tl.load(x_ptr + second_at, mask=mask, other=0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    tl.store(x_ptr + first_at, narrow(wide_a * cos - wide_b * sin, a.dtype), mask=mask)
    tl.store(x_ptr + second_at, narrow(wide_b * cos + wide_a * sin, a.dtype), mask=mask)


def apply_rope(
    x_TnD: Tensor, positions_T: Tensor, cos_LD: Tensor, sin_LD: Tensor, *, interleaved: bool
) -> None:
    """See `expertmesh_kernels.rope.apply_rope`; elements of a head are adjacent.

    Args:
        x_TnD: Rotated in place.
        positions_T: int32 or int64.
        cos_LD: float32, contiguous; likewise the sines.
        sin_LD: See above.
        interleaved: Pairs are (2 i, 2 i + 1), else (i, i + dim / 2).
    """
    num_rows, num_heads, _ = x_TnD.shape
    half = cos_LD.shape[1]
    if num_rows:
        _apply_rope[(num_rows, -(-num_heads // _HEADS))](
            x_TnD, positions_T, cos_LD, sin_LD, x_TnD.stride(0), x_TnD.stride(1), num_heads, half,
            interleaved, HEADS=_HEADS, BLOCK=next_power(half), num_warps=1,
        )  # fmt: skip
