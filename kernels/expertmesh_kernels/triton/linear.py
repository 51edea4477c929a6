"""Linear layers on CUDA devices. R rows, n heads, K input features, N output features."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import dot, kernel, narrow
from expertmesh_kernels.triton.tiles import tile_for


@kernel("num_rows", "x_row", "out_row")
def _linear(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    out_row: tl.tensor,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of one head. Neighbours share columns, so a weight is read from memory once."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < N
    x_ptr += head * x_head + rows.to(tl.int64)[:, None] * x_row
    w_ptr += head * K * N + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        at = k + depth
        if EVEN_K:
            x_mask, w_mask = is_row[:, None], is_column[None, :]
        else:
            x_mask = is_row[:, None] & (at < K)[None, :]
            w_mask = is_column[None, :] & (at < K)[:, None]
        x = tl.load(x_ptr + at[None, :], mask=x_mask, other=0)
        w = tl.load(w_ptr + at.to(tl.int64)[:, None] * N, mask=w_mask, other=0)
        acc = dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0).to(tl.float32)[None, :]
    out_ptr += rows.to(tl.int64)[:, None] * out_row + head * N + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


def linear(
    x_RK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `expertmesh_kernels.linear.linear`.

    Args:
        x_RK: Rows are contiguous.
        weight_KN: Contiguous; if its dtype is not that of x, products are in FP32.
        bias_N: Any floating dtype.
        out_dtype: That of x if None.
    """
    return _run(x_RK[:, None], weight_KN[None], bias_N, out_dtype or x_RK.dtype)[:, 0]


def head_linear(x_RnK: Tensor, weight_nKN: Tensor) -> Tensor:
    """See `expertmesh_kernels.heads.head_linear`; elements of a head are adjacent."""
    return _run(x_RnK, weight_nKN, None, x_RnK.dtype)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    num_rows, num_heads, depth = x.shape
    columns = weight.shape[2]
    if x.stride(2) != 1 and depth > 1:
        x = x.contiguous()
    out = torch.empty(num_rows, num_heads, columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    dtype = x.dtype if x.dtype == weight.dtype else torch.float32
    tile = tile_for(x.device, columns, depth, str(dtype)[6:], num_rows)
    grid = (-(-num_rows // tile.block_m), -(-columns // tile.block_n), num_heads)
    _linear[grid](
        x, weight, weight if bias is None else bias, out, num_rows, columns, depth,
        x.stride(0), x.stride(1), out.stride(0),
        bias is not None, depth % tile.block_k == 0, **tile.options,
    )  # fmt: skip
    return out
