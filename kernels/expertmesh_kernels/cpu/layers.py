"""Decoder layers in one call, with all experts in this process: no Python between layers.

Each step is the kernel that also runs alone, on the same values: so are the bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.attention_half import attention_half
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import FLOATS, address_of, array_at, optional_floats
from expertmesh_kernels.cpu.mlp import NUM_PARTS, combined_mlp
from expertmesh_kernels.cpu.norm import add_norm_rows
from expertmesh_kernels.cpu.router import gate_and_route
from expertmesh_kernels.cpu.sockets import monotonic_ns


class Moe(NamedTuple):
    """The second half of a layer: addresses of arrays, shapes, options."""

    hidden: int
    """H."""
    gate_at: int
    gate_size: int
    gate_bias_at: int
    """Of FP32; 0 if there is none."""
    num_experts: int
    selection_bias_at: int
    is_sigmoid: int
    """This and the next four: see `Rules` of the router."""
    num_groups: int
    top_groups: int
    is_top2_sum: int
    renormalize: int
    norm_at: int
    """Of the weights of what the next layer reads."""
    round_first: int
    table_at: int
    """Of the addresses of experts, [rows, parts]. This and the next five are 0 where experts are
    elsewhere."""
    table_rows: int
    like_at: int
    """Of the first bytes of packed weights; see `PackedLinear.like`."""
    like_size: int
    width: int
    """I."""
    kind: int
    """Of the activation."""


class MoeNumbers(NamedTuple):
    """The options that are fractions."""

    renormalize_eps: np.float32
    scale: np.float32
    alpha: np.float32
    limit: np.float32
    eps: np.float32


@njit
def local_layers(
    x_address: int,
    h_address: int,
    likes: tuple[
        NDArray[np.generic], NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]
    ],
    layers: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]],
    pages_LF: NDArray[np.int64],
    group_of_layer_L: NDArray[np.int64],
    block_tables_GSB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    slots_GT: NDArray[np.int64],
    ids_LTK: NDArray[np.int32],
) -> int:
    """The residual stream after some layers and what comes next reads, both in place.

    Returns the time that gates and experts took, in nanoseconds.

    Args:
        x_address: Of the residual stream, contiguous rows.
        h_address: Of what the first layer reads, contiguous rows; takes what the next one reads.
        likes: Empty arrays of the types of rows, packed weights, panels of keys (see
            `paged_attention`) and experts.
        layers: Fields [L, ...] of `Half`, `Numbers`, `Moe` and `MoeNumbers`.
        pages_LF: Fields of `Pages`.
        group_of_layer_L: KV group.
        block_tables_GSB: Blocks of each sequence in order, by KV group.
        sequence_of_row_T: Row of block tables.
        positions_T: Position of each row.
        slots_GT: block * block_size + offset of each row, by KV group.
        ids_LTK: Takes the chosen experts.
    """
    experts_ns = 0
    halves_LF, numbers_LF, moes_LF, moe_numbers_LF = layers
    like, like_panels, form, like_experts = likes
    for layer in range(pages_LF.shape[0]):
        group = group_of_layer_L[layer]
        attention_half(
            x_address, h_address, like, like_panels, form, halves_LF[layer], numbers_LF[layer],
            pages_LF[layer], block_tables_GSB[group], sequence_of_row_T, positions_T,
            slots_GT[group],
        )  # fmt: skip
        hidden = halves_LF[layer, 0]
        started_ns = monotonic_ns()
        _moe_half(
            x_address, h_address, hidden, like, like_experts, moes_LF[layer],
            moe_numbers_LF[layer], ids_LTK[layer],
        )  # fmt: skip
        experts_ns += monotonic_ns() - started_ns
    return experts_ns


@njit
def _moe_half(
    x_address: int,
    h_address: int,
    hidden: int,
    like: NDArray[np.generic],
    like_experts: NDArray[np.generic],
    fields: NDArray[np.int64],
    numbers: NDArray[np.float32],
    ids_TK: NDArray[np.int32],
) -> None:
    """x += experts(h), h = norm(x); no expert is missing."""
    moe, options = moe_of(fields), moe_numbers_of(numbers)
    num_rows = ids_TK.shape[0]
    weights_TK = np.empty(ids_TK.shape, np.float32)
    counts_E = np.empty(moe.num_experts, np.int64)
    order_N = np.empty(ids_TK.size, np.int64)
    choose(h_address, like, moe, options, ids_TK, weights_TK, counts_E, order_N)
    table = array_at(moe.table_at, moe.table_rows * NUM_PARTS, fields)
    out = np.empty(num_rows * hidden, like.dtype)
    combined_mlp(
        h_address, (num_rows, hidden), like, weights_TK, counts_E, order_N,
        table.reshape((moe.table_rows, NUM_PARTS)),
        array_at(moe.like_at, moe.like_size, like_experts), moe.width, moe.kind, options.alpha,
        options.limit, address_of(out),
    )  # fmt: skip
    add_and_norm(x_address, out, h_address, moe, options)


@njit
def choose(
    h_address: int,
    like: NDArray[np.generic],
    moe: Moe,
    options: MoeNumbers,
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
    counts_E: NDArray[np.int64],
    order_N: NDArray[np.int64],
) -> None:
    """Experts and weights of rows; see `gate_and_route`."""
    rules = (
        moe.is_sigmoid != 0, moe.num_groups, moe.top_groups, moe.is_top2_sum != 0,
        moe.renormalize != 0, options.renormalize_eps, options.scale,
    )  # fmt: skip
    gate_and_route(
        h_address, like, array_at(moe.gate_at, moe.gate_size, FLOATS),
        optional_floats(moe.gate_bias_at, moe.num_experts), rules,
        optional_floats(moe.selection_bias_at, moe.num_experts), moe.num_experts, ids_TK,
        weights_TK, counts_E, order_N,
    )  # fmt: skip


@njit
def add_and_norm(
    x_address: int, out: NDArray[np.generic], h_address: int, moe: Moe, options: MoeNumbers
) -> None:
    """x += out, h = norm(x), of flat rows."""
    x, h = array_at(x_address, out.size, out), array_at(h_address, out.size, out)
    weight = array_at(moe.norm_at, moe.hidden, FLOATS)
    add_norm_rows((x, out, x, h), weight, options.eps, moe.round_first != 0)


@njit
def moe_of(fields: NDArray[np.int64]) -> Moe:
    """From an array of the fields."""
    f = fields
    return Moe(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13],
        f[14], f[15], f[16], f[17], f[18],
    )  # fmt: skip


@njit
def moe_numbers_of(numbers: NDArray[np.float32]) -> MoeNumbers:
    """From an array of the fields."""
    return MoeNumbers(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])
