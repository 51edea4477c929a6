"""How long calls wait for an expert worker's device, as counts that travel in Watch."""

from __future__ import annotations

from collections.abc import Sequence

WAIT_BOUNDS_S = tuple(125e-6 * (1 << n) for n in range(14))
"""Longest wait, in seconds, of each count but the last: 125 us to 1 s. Part of the protocol."""


def wait_quantile_s(calls_by_wait: Sequence[int], share: float) -> float:
    """Wait in seconds that this share of calls does not exceed, between two bounds by proportion.

    Args:
        calls_by_wait: Calls up to each of WAIT_BOUNDS_S, and above; none at all waited for 0 s.
        share: Above 0, at most 1.
    """
    rank = share * sum(calls_by_wait)
    bounds = (*WAIT_BOUNDS_S, 2 * WAIT_BOUNDS_S[-1])
    below_s = 0.0
    for count, bound_s in zip(calls_by_wait, bounds, strict=True):
        if count and rank <= count:
            return below_s + (bound_s - below_s) * rank / count
        rank, below_s = rank - count, bound_s
    return 0.0
