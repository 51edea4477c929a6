"""From logits to tokens on CUDA devices. S rows, V vocabulary.

One program a row, as `expertmesh_kernels.sampling` says, with the same noise; weights are summed in
FP64. The k-th largest weight, and the one at which top-p is reached, are found by their bits, four
of them at a time: weights lie between 0 and 1, and bits sort them. Each pass reads the row's
weights, which stay in the L2 cache. A token may differ from the CPU's where two are as good but for
rounding.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import device, kernel, next_power

_CHUNK = 1024
_TOP_BITS = tl.constexpr(0x3F800000)
"""Of 1, the largest weight."""


@device
def _mix(value: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@device
def _largest(logits_ptr: tl.tensor, V: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The largest logit and its lowest index; NaN counts as -inf."""
    top = tl.full([], float("-inf"), tl.float32)
    at_top = tl.full([], 0, tl.int32)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        x = tl.where(x == x, x, float("-inf"))
        best = tl.max(x, 0)
        index = tl.min(tl.where((x == best) & (i < V), i, V), 0)
        at_top = tl.where(best > top, index, at_top)
        top = tl.maximum(best, top)
    return top, at_top


@device
def _weigh(
    logits_ptr: tl.tensor, weights_ptr: tl.tensor, top: tl.tensor, temperature: tl.tensor,
    floor: tl.tensor, V: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Write exp((logit - top) / temperature), 0 where that is below `floor`."""
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        weight = tl.exp((x - top) / temperature)
        keeps = (x > float("-inf")) & (weight >= floor)
        tl.store(weights_ptr + i, tl.where(keeps, weight, 0.0), mask=i < V)


@device
def _find_bits(
    weights_ptr: tl.tensor, target: tl.tensor, V: tl.tensor, COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest bits so that weights of at least these reach `target` in number or sum."""
    low = tl.full([], 0, tl.int32)
    steps = tl.arange(0, 16)
    for turn in tl.static_range(8):
        bounds = low + (steps << (28 - 4 * turn))
        reached = tl.zeros([16], tl.float64)
        for start in range(0, V, CHUNK):
            i = start + tl.arange(0, CHUNK)
            weight = tl.load(weights_ptr + i, mask=i < V, other=0.0)
            bits = weight.to(tl.int32, bitcast=True)
            part = tl.where(i < V, 1.0, 0.0) if COUNTS else weight
            is_counted = bits[None, :] >= bounds[:, None]
            reached += tl.sum(tl.where(is_counted, part[None, :], 0.0).to(tl.float64), 1)
        # Bounds beyond 1 overflow from the first turn's 8 on; nothing is that large.
        is_reached = (reached >= target) & (bounds >= 0) & (bounds <= _TOP_BITS)
        low = tl.maximum(low, tl.max(tl.where(is_reached, bounds, 0), 0))
    return low


@device
def _reached(
    weights_ptr: tl.tensor, bits: tl.tensor, V: tl.tensor, COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Number or sum of the weights with at least these bits."""
    reached = tl.zeros([CHUNK], tl.float64)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        weight = tl.load(weights_ptr + i, mask=i < V, other=0.0)
        part = tl.where(i < V, 1.0, 0.0) if COUNTS else weight
        is_counted = weight.to(tl.int32, bitcast=True) >= bits
        reached += tl.where(is_counted, part, 0.0).to(tl.float64)
    return tl.sum(reached, 0)


@device
def _cut(
    weights_ptr: tl.tensor, bits: tl.tensor, num_equal: tl.tensor, V: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Zero weights below `bits`, and those equal to it beyond the first `num_equal`."""
    before = tl.full([], 0, tl.int32)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        weight = tl.load(weights_ptr + i, mask=i < V, other=0.0)
        own = weight.to(tl.int32, bitcast=True)
        is_equal = ((own == bits) & (i < V)).to(tl.int32)
        rank = before + tl.cumsum(is_equal, 0)
        keeps = (own > bits) | ((is_equal > 0) & (rank <= num_equal))
        tl.store(weights_ptr + i, tl.where(keeps, weight, 0.0), mask=i < V)
        before += tl.sum(is_equal, 0)


@device
def _race(weights_ptr: tl.tensor, key: tl.tensor, V: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The token with the least -log(u) / weight, the lowest of equals."""
    least = tl.full([], float("inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, V, CHUNK):
        i = start + tl.arange(0, CHUNK)
        weight = tl.load(weights_ptr + i, mask=i < V, other=0.0)
        bits = _mix(key + i.to(tl.uint64) * 0x9E3779B97F4A7C15)
        uniform = ((bits >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        cost = tl.where(weight > 0, -tl.log(uniform) / weight.to(tl.float64), float("inf"))
        best = tl.min(cost, 0)
        index = tl.min(tl.where((cost == best) & (i < V), i, V), 0)
        winner = tl.where(best < least, index, winner)
        least = tl.minimum(best, least)
    return winner


@kernel("num_rows")
def _sample(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    V: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    weights_ptr += row * V
    temperature = tl.load(temperature_ptr + row)
    top, token = _largest(logits_ptr, V, CHUNK)
    if (temperature > 0) & (top > float("-inf")) & (top < float("inf")):
        min_p = tl.load(min_p_ptr + row)
        floor = tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)
        _weigh(logits_ptr, weights_ptr, top, temperature, floor, V, CHUNK)
        tl.debug_barrier()  # what one thread wrote, others read
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < V):
            bits = _find_bits(weights_ptr, top_k, V, True, CHUNK)
            above = _reached(weights_ptr, bits + 1, V, True, CHUNK)
            tl.debug_barrier()
            _cut(weights_ptr, bits, top_k - above.to(tl.int32), V, CHUNK)
            tl.debug_barrier()
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            share = tl.maximum(top_p, 0.0).to(tl.float64)
            target = share * _reached(weights_ptr, 0, V, False, CHUNK)
            bits = _find_bits(weights_ptr, target, V, False, CHUNK)
            if bits > 0:
                missing = target - _reached(weights_ptr, bits + 1, V, False, CHUNK)
                one = bits.to(tl.float32, bitcast=True).to(tl.float64)
                num_equal = tl.maximum(tl.ceil(missing / one), 1.0).to(tl.int32)
                tl.debug_barrier()
                _cut(weights_ptr, bits, num_equal, V, CHUNK)
                tl.debug_barrier()
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        key = _mix(seed + 0x9E3779B97F4A7C15)
        key = _mix(key ^ tl.load(positions_ptr + row).to(tl.uint64))
        token = _race(weights_ptr, key, V, CHUNK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    min_p_S: Tensor,
    top_p_S: Tensor,
    top_k_S: Tensor,
    seeds_S: Tensor,
    positions_S: Tensor,
) -> Tensor:
    """See `expertmesh_kernels.sampling.sample`; int64 [S], on the device.

    Args:
        logits_SV: float32, contiguous.
        temperature_S: float32, as the next two.
        min_p_S: See above.
        top_p_S: See above.
        top_k_S: int32.
        seeds_S: int64: the bits of the 64-bit seeds.
        positions_S: int64.
    """
    num_rows, vocab_size = logits_SV.shape
    tokens_S = logits_SV.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _sample[(num_rows,)](
            logits_SV, torch.empty_like(logits_SV), temperature_S, min_p_S, top_p_S, top_k_S,
            seeds_S, positions_S, tokens_S, vocab_size,
            CHUNK=min(_CHUNK, next_power(vocab_size)), num_warps=8,
        )  # fmt: skip
    return tokens_S
