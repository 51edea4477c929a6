"""Scores and top-k of the gate's logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.block import multiply
from expertmesh_kernels.cpu.by_expert import order_by_expert
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at
from expertmesh_kernels.cpu.primitives import exp
from expertmesh_kernels.cpu.scratch import scratch_floats, scratch_like
from expertmesh_kernels.cpu.storage import widen_into
from expertmesh_kernels.cpu.team import parallel_for
from expertmesh_kernels.cpu.tile import PANEL

_MINUS_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ROWS = 24
"""Rows of a chunk."""
_BOOLS = np.empty(0, np.bool_)

Rules = tuple[bool, int, int, bool, bool, np.float32, np.float32]
"""A gate's equation: scores are sigmoids, else a softmax; groups of adjacent experts; groups to
choose from, those of the best score, ties to the lowest; a group's score is the sum of its two
largest choices, else the largest; weights are divided by their sum plus eps; eps; their factor."""


@njit
def gate_and_route(
    h_address: int,
    like: NDArray[np.generic],
    panels: NDArray[np.generic],
    gate_bias_E: NDArray[np.float32],
    rules: Rules,
    bias_E: NDArray[np.float32],
    num_experts: int,
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
    counts_E: NDArray[np.int64],
    order_N: NDArray[np.int64],
) -> None:
    """Logits of rows by the gate, and `route` of them, in one pass over the rows.

    Args:
        h_address: Of contiguous rows.
        like: Their type.
        panels: Flat weights of the gate, FP32.
        gate_bias_E: Added to the logits; or empty.
        rules: See `Rules`.
        bias_E: Added to the scores for the choice alone; empty for none.
        num_experts: E.
        ids_TK: Experts.
        weights_TK: Their weights.
        counts_E: Takes the slots of each expert; empty for neither these nor their order.
        order_N: Takes the slots, t * K + j, by expert; see `order_by_expert`.
    """
    num_rows = ids_TK.shape[0]
    depth = panels.size // (-(-num_experts // PANEL) * PANEL)
    h = array_at(h_address, num_rows * depth, like)
    parallel_for(
        _gate_chunk,
        (h, depth, panels, gate_bias_E, rules, bias_E, num_experts, ids_TK, weights_TK),
        -(-num_rows // _ROWS),
    )
    if counts_E.size > 0:
        order_by_expert(ids_TK.reshape(ids_TK.size), counts_E, order_N)


@njit
def _gate_chunk(
    h: NDArray[np.generic],
    depth: int,
    panels: NDArray[np.generic],
    gate_bias_E: NDArray[np.float32],
    rules: Rules,
    bias_E: NDArray[np.float32],
    num_experts: int,
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
    chunk: int,
) -> None:
    first = chunk * _ROWS
    rows = min(_ROWS, ids_TK.shape[0] - first)
    wide = scratch_floats(rows * depth)
    widen_into(h, first * depth, rows * depth, wide, 0)
    acc = scratch_floats(_ROWS * PANEL)
    logits = scratch_floats(rows * num_experts).reshape((rows, num_experts))
    for panel in range(-(-num_experts // PANEL)):
        multiply(wide, 0, depth, rows, panels, panel, depth, None, acc)
        column = panel * PANEL
        for r in range(rows):
            for c in range(min(PANEL, num_experts - column)):
                bias = gate_bias_E[column + c] if gate_bias_E.size > 0 else _ZERO
                logits[r, column + c] = acc[r * PANEL + c] + bias
    last = first + rows
    _route_rows(logits, rules, bias_E, ids_TK[first:last], weights_TK[first:last])


@njit
def route(
    logits_TE: NDArray[np.float32],
    rules: Rules,
    bias_E: NDArray[np.float32],
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
    counts_E: NDArray[np.int64],
    order_N: NDArray[np.int64],
) -> None:
    """Experts of each row and their weights, and slots by expert; see `gate_and_route`."""
    _route_rows(logits_TE, rules, bias_E, ids_TK, weights_TK)
    order_by_expert(ids_TK.reshape(ids_TK.size), counts_E, order_N)


@njit
def _route_rows(
    logits_TE: NDArray[np.float32],
    rules: Rules,
    bias_E: NDArray[np.float32],
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
) -> None:
    """The k experts of each row of the largest choice, ties to the lowest id, and their weights.

    A softmax keeps the order of the logits. So where nothing is added to its scores, the logits
    choose: then no two of them tie because their scores were rounded alike.

    Args:
        logits_TE: NaN counts as -inf.
        rules: See `Rules`.
        bias_E: Added to the scores for the choice alone; empty for none.
        ids_TK: Experts.
        weights_TK: Their weights.
    """
    is_sigmoid, num_groups, top_groups, is_top2_sum, renormalize, eps, scale = rules
    num_experts = logits_TE.shape[1]
    scores, choice = scratch_floats(num_experts), scratch_floats(num_experts)
    taken = scratch_like(num_experts, _BOOLS)
    group_scores = scratch_floats(num_groups)
    by_logits = not is_sigmoid and bias_E.size == 0 and not (num_groups > 1 and is_top2_sum)
    for t in range(logits_TE.shape[0]):
        logits, ids = logits_TE[t], ids_TK[t]
        if is_sigmoid:
            total = _sigmoid(logits, scores)
        else:
            total = _softmax(logits, np.float32(ids.size), scores)
        _choice(logits if by_logits else scores, _ONE if by_logits else total, bias_E, choice)
        taken[:] = False
        if num_groups > 1:
            _score_groups(choice, is_top2_sum, group_scores)
            _close_groups(group_scores, top_groups, taken)
        for j in range(ids.size):
            ids[j] = _largest_free(choice, taken)
            taken[ids[j]] = True
        _weigh(scores, total, renormalize, eps, scale, ids, weights_TK[t])


@njit
def _sigmoid(logits: NDArray[np.float32], scores: NDArray[np.float32]) -> np.float32:
    """Scores, and what they are to be divided by: 1."""
    for e in range(logits.size):
        score = _ONE / (_ONE + exp(-logits[e]))
        scores[e] = _ZERO if np.isnan(logits[e]) else score
    return _ONE


@njit
def _softmax(
    logits: NDArray[np.float32], top_k: np.float32, scores: NDArray[np.float32]
) -> np.float32:
    """Scores, and what they are to be divided by.

    Where the softmax is undefined, without a finite maximum, each expert has the score 1 / k.
    """
    top = _MINUS_INF
    for e in range(logits.size):
        top = logits[e] if logits[e] > top else top
    if not np.isfinite(top):
        scores[:] = _ONE
        return top_k
    total = _ZERO
    for e in range(logits.size):
        scores[e] = _ZERO if np.isnan(logits[e]) else exp(logits[e] - top)
        total += scores[e]
    return total


@njit
def _choice(
    values: NDArray[np.float32],
    total: np.float32,
    bias_E: NDArray[np.float32],
    choice: NDArray[np.float32],
) -> None:
    """choice = values / total + bias; NaN becomes -inf."""
    for e in range(values.size):
        value = values[e] / total
        if bias_E.size > 0:
            value += bias_E[e]
        choice[e] = _MINUS_INF if np.isnan(value) else value


@njit
def _score_groups(
    choice: NDArray[np.float32], is_top2_sum: bool, group_scores: NDArray[np.float32]
) -> None:
    size = choice.size // group_scores.size
    for group in range(group_scores.size):
        best = _MINUS_INF
        second = _MINUS_INF
        for e in range(group * size, (group + 1) * size):
            second = max(second, min(best, choice[e]))
            best = max(best, choice[e])
        group_scores[group] = best + second if is_top2_sum else best


@njit
def _close_groups(
    group_scores: NDArray[np.float32], top_groups: int, taken: NDArray[np.bool_]
) -> None:
    """Mark the experts of all groups but the best as taken."""
    size = taken.size // group_scores.size
    is_open = np.zeros(group_scores.size, np.bool_)
    for _ in range(top_groups):
        is_open[_largest_free(group_scores, is_open)] = True
    for e in range(taken.size):
        taken[e] = not is_open[e // size]


@njit
def _largest_free(values: NDArray[np.float32], taken: NDArray[np.bool_]) -> int:
    """Index of the largest value that is not taken, the first of equals."""
    best = -1
    for e in range(values.size):
        if not taken[e] and (best < 0 or values[e] > values[best]):
            best = e
    return best


@njit
def _weigh(
    scores: NDArray[np.float32],
    total: np.float32,
    renormalize: bool,
    eps: np.float32,
    scale: np.float32,
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
) -> None:
    """Weights of the chosen experts; equal ones if their scores are all zero and must sum to 1."""
    divisor = total
    if renormalize:
        divisor = _ZERO
        for j in range(ids.size):
            divisor += scores[ids[j]]
        divisor += eps * total
    for j in range(ids.size):
        weight = scores[ids[j]] / divisor if divisor > 0 else _ONE / np.float32(ids.size)
        weights[j] = weight * scale
