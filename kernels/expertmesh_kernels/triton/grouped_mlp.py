"""Gated FFNs on CUDA devices. R rows, H hidden size, I intermediate size, N pairs, E experts.

Two kernels: act(gate(x), up(x)), [N, I], and the down projection, [N, H]. A program computes a
block of rows of one expert, found through `order_by_expert`; what belongs to no expert costs a
program that ends at once. Without an order, rows are their own pairs, all of expert 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from expertmesh.model_config import Activation
from expertmesh_kernels.triton.activation import activate, numbers
from expertmesh_kernels.triton.jit import device, dot, kernel, narrow
from expertmesh_kernels.triton.order import Order, order_by_expert
from expertmesh_kernels.triton.tiles import Tile, tile_for
from expertmesh_kernels.triton.weights import STEP, WeightTable, expand


@dataclass(frozen=True)
class MlpTables:
    """Weights of gated FFNs."""

    gate_up: WeightTable
    """H -> 2I, gate first."""
    down: WeightTable
    """I -> H."""


@device
def _load_rows(
    row_ptrs: tl.tensor, is_row: tl.tensor, k: tl.tensor, K: tl.tensor,
    EVEN_K: tl.constexpr, LENGTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    at = k + tl.arange(0, LENGTH)
    mask = is_row[:, None]
    if not EVEN_K:
        mask = mask & (at < K)[None, :]
    return tl.load(row_ptrs[:, None] + at[None, :], mask=mask, other=0)


@device
def _load_weights(
    w_ptr: tl.tensor, k: tl.tensor, columns: tl.tensor, is_column: tl.tensor, K: tl.tensor,
    N: tl.tensor, EVEN_K: tl.constexpr, LENGTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    at = k + tl.arange(0, LENGTH)
    mask = is_column[None, :]
    if not EVEN_K:
        mask = mask & (at < K)[:, None]
    return tl.load(w_ptr + at.to(tl.int64)[:, None] * N + columns[None, :], mask=mask, other=0)


@device
def _matmul(
    row_ptrs: tl.tensor, is_row: tl.tensor,
    w_ptr: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor,
    columns: tl.tensor, is_column: tl.tensor, shift: tl.tensor, N: tl.tensor, K: tl.tensor,
    PAIR: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of rows with columns and, if PAIR, with those `shift` further right."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if FORMAT == "plain":
            x = _load_rows(row_ptrs, is_row, k, K, EVEN_K, BLOCK_K)
            w = _load_weights(w_ptr, k, columns, is_column, K, N, EVEN_K, BLOCK_K)
            acc = dot(x, w, acc)
            if PAIR:
                w = _load_weights(w_ptr, k, columns + shift, is_column, K, N, EVEN_K, BLOCK_K)
                acc2 = dot(x, w, acc2)
        elif FORMAT == "int8" or FORMAT == "fp8":
            x = _load_rows(row_ptrs, is_row, k, K, EVEN_K, BLOCK_K)
            codes = _load_weights(w_ptr, k, columns, is_column, K, N, True, BLOCK_K)
            w = expand(codes, scale_ptr, zero_ptr, k, columns, is_column, N,
                       FORMAT, GROUP, HAS_ZEROS, BLOCK_K, x.dtype)  # fmt: skip
            acc = dot(x, w, acc)
            if PAIR:
                codes = _load_weights(w_ptr, k, columns + shift, is_column, K, N, True, BLOCK_K)
                w = expand(codes, scale_ptr, zero_ptr, k, columns + shift, is_column, N,
                           FORMAT, GROUP, HAS_ZEROS, BLOCK_K, x.dtype)  # fmt: skip
                acc2 = dot(x, w, acc2)
        else:
            HALF: tl.constexpr = BLOCK_K // 2
            x = _load_rows(row_ptrs, is_row, k, K, EVEN_K, HALF)
            x2 = _load_rows(row_ptrs, is_row, k + HALF, K, EVEN_K, HALF)
            codes = _load_weights(w_ptr, k // 2, columns, is_column, K, N, True, HALF)
            w = expand(codes & 15, scale_ptr, zero_ptr, k, columns, is_column, N,
                       FORMAT, GROUP, HAS_ZEROS, HALF, x.dtype)  # fmt: skip
            acc = dot(x, w, acc)
            w = expand(codes >> 4, scale_ptr, zero_ptr, k + HALF, columns, is_column, N,
                       FORMAT, GROUP, HAS_ZEROS, HALF, x.dtype)  # fmt: skip
            acc = dot(x2, w, acc)
            if PAIR:
                codes = _load_weights(w_ptr, k // 2, columns + shift, is_column, K, N, True, HALF)
                w = expand(codes & 15, scale_ptr, zero_ptr, k, columns + shift, is_column, N,
                           FORMAT, GROUP, HAS_ZEROS, HALF, x.dtype)  # fmt: skip
                acc2 = dot(x, w, acc2)
                w = expand(codes >> 4, scale_ptr, zero_ptr, k + HALF, columns + shift, is_column,
                           N, FORMAT, GROUP, HAS_ZEROS, HALF, x.dtype)  # fmt: skip
                acc2 = dot(x2, w, acc2)
    return acc, acc2


@device
def _pointer(table_ptr: tl.tensor, at: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """An entry of a table; all are multiples of 16."""
    return tl.multiple_of(tl.load(table_ptr + at), 16).to(tl.pointer_type(DTYPE))


@kernel("num_pairs")
def _run(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pairs: tl.tensor,
    x_row: tl.tensor,
    width: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    ORDERED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of [pairs, width]; with an activation, of both halves of N = 2 * width columns."""
    pairs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(2)  # there is one: 0
    if ORDERED:
        expert = tl.load(experts_ptr + tl.program_id(0))
        if expert < 0:
            return
        pairs = tl.load(pairs_ptr + pairs)
    is_row = pairs < num_pairs
    rows = pairs
    if HAS_ROWS:
        rows = tl.load(rows_ptr + pairs, mask=is_row, other=0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < width
    table_ptr += expert.to(tl.int64) * 4
    w_ptr = _pointer(table_ptr, 0, DTYPE)
    SCALE_DTYPE: tl.constexpr = tl.uint8 if FORMAT == "mxfp4" else tl.float32
    scale_ptr = _pointer(table_ptr, 1, SCALE_DTYPE)
    zero_ptr = _pointer(table_ptr, 2, tl.float32)
    bias_ptr = _pointer(table_ptr, 3, BIAS_DTYPE)
    row_ptrs = x_ptr + rows.to(tl.int64) * x_row
    acc, acc2 = _matmul(
        row_ptrs, is_row, w_ptr, scale_ptr, zero_ptr, columns, is_column, width, N, K,
        KIND != "none", FORMAT, GROUP, HAS_ZEROS, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0).to(tl.float32)[None, :]
    if KIND != "none":
        if HAS_BIAS:
            bias_ptr += width
            acc2 += tl.load(bias_ptr + columns, mask=is_column, other=0).to(tl.float32)[None, :]
        acc = activate(acc, acc2, alpha, limit, KIND)
    out_ptr += pairs.to(tl.int64)[:, None] * width + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


def gated_mlp(x_RH: Tensor, tables: MlpTables, activation: Activation) -> Tensor:
    """See `expertmesh_kernels.grouped_mlp.gated_mlp`.

    Args:
        x_RH: Rows are contiguous.
        tables: Of one FFN.
        activation: What is done with gate and up.
    """
    tile = _tile(x_RH, tables.gate_up, len(x_RH))
    return _both(x_RH, None, None, len(x_RH), tables, activation, tile)


def grouped_mlp(
    x_RH: Tensor,
    row_of_pair_N: Tensor,
    expert_of_pair_N: Tensor,
    tables: MlpTables,
    activation: Activation,
) -> Tensor:
    """See `expertmesh_kernels.grouped_mlp.grouped_mlp`.

    Args:
        x_RH: Rows are contiguous.
        row_of_pair_N: int32 or int64.
        expert_of_pair_N: int32: places in the tables; -1 for a pair of nobody, whose output is
            left undefined.
        tables: Weights of E experts.
        activation: What is done with gate and up.
    """
    num_pairs = len(expert_of_pair_N)
    if not num_pairs:
        return x_RH.new_empty(0, tables.down.like.columns)
    num_experts = len(tables.gate_up.pointers_E4)
    tile = _tile(x_RH, tables.gate_up, num_pairs // min(num_pairs, num_experts))
    order = order_by_expert(expert_of_pair_N, num_experts, tile.block_m)
    return _both(x_RH, row_of_pair_N, order, num_pairs, tables, activation, tile)


def _both(
    x_RH: Tensor,
    row_of_pair_N: Tensor | None,
    order: Order | None,
    num_pairs: int,
    tables: MlpTables,
    activation: Activation,
    tile: Tile,
) -> Tensor:
    width = tables.gate_up.like.columns // 2
    act_NI = x_RH.new_empty(num_pairs, width)
    _launch(x_RH, row_of_pair_N, order, tables.gate_up, act_NI, activation, tile)
    out_NH = x_RH.new_empty(num_pairs, tables.down.like.columns)
    down_tile = _tile(act_NI, tables.down, tile.block_m)
    _launch(act_NI, None, order, tables.down, out_NH, None, down_tile)
    return out_NH


def _launch(
    x: Tensor,
    row_of_pair_N: Tensor | None,
    order: Order | None,
    table: WeightTable,
    out: Tensor,
    activation: Activation | None,
    tile: Tile,
) -> None:
    num_pairs, width = out.shape
    if not num_pairs:
        return
    if x.shape[1] != table.like.depth:
        raise ValueError(f"x has {x.shape[1]} features, expected {table.like.depth}")
    num_blocks = -(-num_pairs // tile.block_m) if order is None else len(order.expert_of_block)
    options = tile.options
    if activation is not None:
        options["BLOCK_N"] = max(tile.block_n // 2, 16)  # of either half
    if table.like.format != "plain":
        options["BLOCK_K"] = STEP
    scalars = (0.0, 0.0) if activation is None else numbers(activation)
    _run[(num_blocks, -(-width // options["BLOCK_N"]), 1)](
        x, out if row_of_pair_N is None else row_of_pair_N,
        out if order is None else order.pairs, out if order is None else order.expert_of_block,
        table.pointers_E4, out, num_pairs, x.stride(0), width,
        table.like.columns, table.like.depth, *scalars,
        KIND="none" if activation is None else activation.kind,
        ORDERED=order is not None, HAS_ROWS=row_of_pair_N is not None,
        EVEN_K=table.like.depth % options["BLOCK_K"] == 0, **table.options, **options,
    )  # fmt: skip


def _tile(x: Tensor, table: WeightTable, rows: int) -> Tile:
    like = table.like
    kind = str(x.dtype)[6:] if like.format == "plain" else like.format
    return tile_for(x.device, like.columns, like.depth, kind, rows)
