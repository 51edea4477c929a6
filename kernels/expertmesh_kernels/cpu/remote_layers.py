"""Decoder layers in one call, with experts on expert workers, as long as all is as usual.

A layer is its attention half, its gate, and an exchange (see `cpu.exchange_words`). Where the
exchange cannot be begun, or does not end as usual, the call ends in the middle of that layer:
Python finishes it, and calls again for those after it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.attention_half import attention_half
from expertmesh_kernels.cpu.exchange_receive import receive
from expertmesh_kernels.cpu.exchange_send import send
from expertmesh_kernels.cpu.exchange_words import STATE_LAYER, STATE_MICRO_BATCH, UNUSUAL
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.layers import add_and_norm, choose, moe_numbers_of, moe_of
from expertmesh_kernels.cpu.memory import address_of
from expertmesh_kernels.cpu.sockets import monotonic_ns

IS_SENT, BEGUN_NS, DISPATCH_NS, WAIT_NS, BUSY_US = 0, 1, 2, 3, 4
NUM_REPORT_WORDS = 5
"""What a call reports: whether the rows of the last layer were sent, and when that began; times so
far: to hand over rows, to wait, and what the slowest expert worker of each layer computed."""
_NS_PER_S = 1e9


@njit
def remote_layers(
    x_address: int,
    h_address: int,
    likes: tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]],
    layers: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]],
    pages_LF: NDArray[np.int64],
    group_of_layer_L: NDArray[np.int64],
    block_tables_GSB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    slots_GT: NDArray[np.int64],
    ids_LTK: NDArray[np.int32],
    weights_LTK: NDArray[np.float32],
    exchange: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    routes: tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]],
    begin: int,
    first_layer: int,
    num_generated_rows: int,
    timeout_s: float,
    step_deadline_s: float,
    report: NDArray[np.int64],
) -> int:
    """The residual stream after some layers and what comes next reads, both in place.

    Returns their number; or an earlier layer, which is complete but for its experts.

    Args:
        x_address: See `local_layers`, as for all up to `ids_LTK`; `likes` without experts.
        h_address: Of what layer `begin` reads.
        likes: Of rows, packed weights, panels of keys.
        layers: Fields of `Half`, `Numbers`, `Moe`, `MoeNumbers`.
        pages_LF: Fields of `Pages`.
        group_of_layer_L: KV group.
        block_tables_GSB: By KV group.
        sequence_of_row_T: Row of block tables.
        positions_T: Of each row.
        slots_GT: By KV group.
        ids_LTK: Takes the chosen experts.
        weights_LTK: Takes their weights.
        exchange: State, links and calls of `exchange_words`.
        routes: `Route` of each layer; the factors are those of all.
        begin: First layer to compute.
        first_layer: Number of layer 0 in the model.
        num_generated_rows: Leading rows that belong to generated tokens.
        timeout_s: Longest time of one layer's exchange.
        step_deadline_s: Of the step, on the monotonic clock.
        report: Takes `NUM_REPORT_WORDS`; times are added.
    """
    halves_LF, numbers_LF, moes_LF, moe_numbers_LF = layers
    like, like_panels, form = likes
    state, links_W, calls_WC = exchange
    is_fixed_L, worker_of_expert_LE, copies_LER, penalty_W = routes
    num_layers = int(pages_LF.shape[0])
    out = np.empty(positions_T.size * halves_LF[0, 0], like.dtype)
    no_counts = np.empty(0, np.int64)  # who gets rows is a matter of expert workers, not of experts
    for layer in range(begin, num_layers):
        group = group_of_layer_L[layer]
        attention_half(
            x_address, h_address, like, like_panels, form, halves_LF[layer], numbers_LF[layer],
            pages_LF[layer], block_tables_GSB[group], sequence_of_row_T, positions_T,
            slots_GT[group],
        )  # fmt: skip
        moe, options = moe_of(moes_LF[layer]), moe_numbers_of(moe_numbers_LF[layer])
        ids_TK, weights_TK = ids_LTK[layer], weights_LTK[layer]
        choose(h_address, like, moe, options, ids_TK, weights_TK, no_counts, no_counts)
        begun_ns = monotonic_ns()
        state[STATE_LAYER], state[STATE_MICRO_BATCH] = first_layer + layer, 0
        deadline_s = min(begun_ns / _NS_PER_S + timeout_s, step_deadline_s)
        is_sent = send(
            state, links_W, calls_WC, is_fixed_L[layer], worker_of_expert_LE[layer],
            copies_LER[layer], penalty_W, ids_TK, num_generated_rows, h_address, deadline_s,
        )  # fmt: skip
        sent_ns = monotonic_ns()
        report[IS_SENT], report[BEGUN_NS] = is_sent, begun_ns
        report[DISPATCH_NS] += sent_ns - begun_ns
        if not is_sent:
            return layer
        busy_us = receive(state, links_W, calls_WC, weights_TK, address_of(out), like)
        report[WAIT_NS] += monotonic_ns() - sent_ns
        if busy_us == UNUSUAL:
            return layer
        report[BUSY_US] += busy_us
        add_and_norm(x_address, out, h_address, moe, options)
    return num_layers
