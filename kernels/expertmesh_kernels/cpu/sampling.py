"""Choosing tokens, and their log probabilities. V vocabulary, S rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import exp, float_bits, float_from_bits, log
from expertmesh_kernels.cpu.storage import lane_max
from expertmesh_kernels.cpu.team import parallel_for

LOWEST_LOGPROB = np.float32(-9999.0)
"""Stands for minus infinity, which JSON cannot carry."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE_BITS = 0x3F800000
_SUM_LANES = 16
_RACE_BLOCK = 1024
_ROUNDING = 1e-12
"""More than what `log` and the margin are off by, less than what matters."""


@njit
def sample(
    logits_SV: NDArray[np.float32],
    temperature_S: NDArray[np.float32],
    min_p_S: NDArray[np.float32],
    top_p_S: NDArray[np.float32],
    top_k_S: NDArray[np.int32],
    seeds_S: NDArray[np.uint64],
    positions_S: NDArray[np.int64],
    tokens_S: NDArray[np.int64],
) -> None:
    """One token per row; `expertmesh_kernels.sampling` says how. Rows are shared out."""
    settings = (temperature_S, min_p_S, top_p_S, top_k_S)
    arguments = (logits_SV, settings, seeds_S, positions_S, tokens_S)
    parallel_for(_sample_row, arguments, tokens_S.size)


@njit
def _sample_row(
    logits_SV: NDArray[np.float32],
    settings: tuple[
        NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]
    ],
    seeds_S: NDArray[np.uint64],
    positions_S: NDArray[np.int64],
    tokens_S: NDArray[np.int64],
    s: int,
) -> None:
    temperature_S, min_p_S, top_p_S, top_k_S = settings
    logits = logits_SV[s]
    top = lane_max(logits)
    temperature = temperature_S[s]
    if not temperature > np.float32(0.0) or not np.isfinite(top):
        tokens_S[s] = _first_at(logits, top) if top > np.float32(-np.inf) else 0
        return
    weights = np.empty(logits.size, np.float32)
    _weights(logits, top, temperature, weights)
    if min_p_S[s] > np.float32(0.0):
        _keep_min_p(weights, min(min_p_S[s], np.float32(1.0)))
    if 0 < top_k_S[s] < logits.size:
        _keep_top_k(weights, top_k_S[s])
    if top_p_S[s] < np.float32(1.0):
        _keep_top_p(weights, top_p_S[s])
    key = _mix(_mix(seeds_S[s] + _GOLDEN) ^ np.uint64(positions_S[s]))
    indices = np.empty(logits.size, np.int64)
    num_left = _find_positive(weights, indices)
    if num_left < logits.size // 4:
        tokens_S[s] = _race_of_few(weights, indices[:num_left], key)
    else:
        tokens_S[s] = _race(weights, key)


@njit
def finite_rows(logits_SV: NDArray[np.float32], finite_S: NDArray[np.bool_]) -> None:
    """Which rows are free of NaN and infinities."""
    parallel_for(_finite_row, (logits_SV, finite_S), finite_S.size)


@njit
def _finite_row(logits_SV: NDArray[np.float32], finite_S: NDArray[np.bool_], s: int) -> None:
    largest = np.int32(0)
    logits = logits_SV[s]
    for i in range(logits.size):
        largest = max(largest, float_bits(logits[i]) & np.int32(0x7FFFFFFF))
    finite_S[s] = largest < np.int32(0x7F800000)


@njit
def top_logprobs(
    logits_SV: NDArray[np.float32],
    token_ids_S: NDArray[np.int64],
    chosen_S: NDArray[np.float32],
    ids_SN: NDArray[np.int64],
    logprobs_SN: NDArray[np.float32],
) -> None:
    """Log softmax of the chosen token and of the most likely ones, descending, ties to low ids."""
    work = np.empty(logits_SV.shape[1], np.float32)
    for s in range(logits_SV.shape[0]):
        logits = logits_SV[s]
        for i in range(work.size):
            work[i] = logits[i] if logits[i] == logits[i] else np.float32(-np.inf)
        top = lane_max(work)
        log_total = _log_total(work, top)
        chosen_S[s] = _logprob(work[token_ids_S[s]], top, log_total)
        for n in range(ids_SN.shape[1]):
            best = _first_at(work, lane_max(work))
            ids_SN[s, n] = best
            logprobs_SN[s, n] = _logprob(work[best], top, log_total)
            work[best] = np.float32(np.nan)  # neither a maximum nor equal to one


@njit
def _first_at(values: NDArray[np.float32], value: np.float32) -> int:
    """The first index that holds `value`; 0 if none does."""
    for i in range(values.size):
        if values[i] == value:
            return i
    return 0


@njit
def _weights(
    logits: NDArray[np.float32],
    top: np.float32,
    temperature: np.float32,
    weights: NDArray[np.float32],
) -> None:
    """exp((logit - top) / temperature); 0 for NaN and -inf."""
    for i in range(weights.size):
        weight = exp((logits[i] - top) / temperature)
        weights[i] = weight if logits[i] > np.float32(-np.inf) else np.float32(0.0)


@njit
def _keep_min_p(weights: NDArray[np.float32], min_p: np.float32) -> None:
    """Zero weights below min_p; the largest weight is 1, so a weight is a share of it."""
    for i in range(weights.size):
        weights[i] = weights[i] if weights[i] >= min_p else np.float32(0.0)


@njit
def _keep_top_k(weights: NDArray[np.float32], k: int) -> None:
    """Zero all but the k largest weights, ties to low ids: bisects the bits of the k-th."""
    low, high = 0, _ONE_BITS + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _count_from(weights, middle) >= k:
            low = middle
        else:
            high = middle
    _cut(weights, low, k - _count_from(weights, low + 1))


@njit
def _keep_top_p(weights: NDArray[np.float32], top_p: np.float32) -> None:
    """Zero all but the fewest largest weights that reach top_p of the total, ties to low ids.

    Weights below (1 - top_p) / V of the total can't be among them, even all together, so the
    bisection runs on the rest: few, for what a model predicts.
    """
    share = max(np.float64(top_p), 0.0)
    total = _sum_from(weights, 0)
    candidates = np.empty(weights.size, np.float32)
    rest = candidates[: _collect(weights, (1.0 - share) * total / weights.size, candidates)]
    target = share * total
    low, high = 0, _ONE_BITS + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _sum_from(rest, middle) >= target:
            low = middle
        else:
            high = middle
    if low > 0:
        missing = target - _sum_from(rest, low + 1)
        _cut(weights, low, max(1, int(np.ceil(missing / float_from_bits(np.int32(low))))))


@njit
def _collect(weights: NDArray[np.float32], floor: float, candidates: NDArray[np.float32]) -> int:
    """Copy the positive weights of at least `floor`; returns their number."""
    count = 0
    for i in range(weights.size):
        if weights[i] >= floor and weights[i] > np.float32(0.0):
            candidates[count] = weights[i]
            count += 1
    return count


@njit
def _cut(weights: NDArray[np.float32], bits: int, num_equal: int) -> None:
    """Zero weights below `bits`, and those equal to it beyond the first `num_equal`."""
    for i in range(weights.size):
        own = float_bits(weights[i])
        if own < bits:
            weights[i] = np.float32(0.0)
        elif own == bits:
            if num_equal <= 0:
                weights[i] = np.float32(0.0)
            num_equal -= 1


@njit
def _count_from(weights: NDArray[np.float32], bits: int) -> int:
    """How many weights have at least these bits; weights are not negative, so bits sort them."""
    bound = np.int32(bits)
    count = np.int32(0)
    for i in range(weights.size):
        count += np.int32(1) if float_bits(weights[i]) >= bound else np.int32(0)
    return int(count)


@njit
def _sum_from(weights: NDArray[np.float32], bits: int) -> float:
    """Sum of the weights with at least these bits, in FP64, in the lane order of `lane_sum`."""
    bound = np.int32(bits)
    lanes = np.zeros(_SUM_LANES, np.float64)
    whole = weights.size - weights.size % _SUM_LANES
    for block in range(0, whole, _SUM_LANES):
        row = weights[block : block + _SUM_LANES]
        for lane in range(_SUM_LANES):
            lanes[lane] += row[lane] if float_bits(row[lane]) >= bound else np.float32(0.0)
    for i in range(whole, weights.size):
        lanes[i - whole] += weights[i] if float_bits(weights[i]) >= bound else np.float32(0.0)
    for step in (8, 4, 2, 1):
        for lane in range(step):
            lanes[lane] += lanes[lane + step]
    return float(lanes[0])


@njit
def _find_positive(weights: NDArray[np.float32], indices: NDArray[np.int64]) -> int:
    """Write the indices of positive weights, ascending; returns their number."""
    count = 0
    for i in range(weights.size):
        indices[count] = i
        count += 1 if weights[i] > np.float32(0.0) else 0
    return count


@njit
def _race(weights: NDArray[np.float32], key: np.uint64) -> int:
    """The token with the least -log(u) / weight, the first one of several: Gumbel-max.

    -log(u) is at least 1 - u, so most tokens are out of it without a logarithm.
    """
    winner = _first_at(weights, np.float32(1.0))  # the largest
    best = _cost(weights[winner], key, winner)
    margins = np.empty(_RACE_BLOCK, np.float64)
    for begin in range(0, weights.size, _RACE_BLOCK):
        block = weights[begin : begin + _RACE_BLOCK]
        for i in range(block.size):
            margins[i] = 1.0 - _uniform(key, begin + i) - best * np.float64(block[i])
        for i in range(block.size):
            if margins[i] < _ROUNDING:
                cost = _cost(block[i], key, begin + i)
                if cost < best or (cost == best and begin + i < winner):
                    best, winner = cost, begin + i
    return winner


@njit
def _race_of_few(weights: NDArray[np.float32], indices: NDArray[np.int64], key: np.uint64) -> int:
    """What `_race` gives where only these weights are positive."""
    best, winner = float(np.inf), 0
    for i in indices:
        cost = _cost(weights[i], key, i)
        if cost < best:
            best, winner = cost, i
    return winner


@njit
def _cost(weight: np.float32, key: np.uint64, token: int) -> float:
    return float(-log(_uniform(key, token)) / np.float64(weight))


@njit
def _uniform(key: np.uint64, token: int) -> float:
    bits = _mix(key + np.uint64(token) * _GOLDEN)
    return float((np.float64(bits >> np.uint64(11)) + 0.5) * 2.0**-53)


@njit
def _mix(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit
def _log_total(logits: NDArray[np.float32], top: np.float32) -> np.float32:
    """log(sum(exp(logit - top))); 0 if the row has no finite maximum."""
    if not np.isfinite(top):
        return np.float32(0.0)
    weights = np.empty(logits.size, np.float32)
    for i in range(logits.size):
        weights[i] = exp(logits[i] - top)
    return np.float32(log(_sum_from(weights, 0)))


@njit
def _logprob(logit: np.float32, top: np.float32, log_total: np.float32) -> np.float32:
    value = np.float32(0.0) if logit == top else logit - top - log_total
    value = -log_total if logit == top else value
    return value if value > LOWEST_LOGPROB else LOWEST_LOGPROB
