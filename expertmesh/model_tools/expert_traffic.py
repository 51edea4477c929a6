"""How much of a token travels between attention worker and expert workers.

A token's row goes once to each expert worker that holds an expert which its gate chose, and one row
per chosen expert comes back. How many expert workers that are depends on the gate; here it is
taken to choose evenly, which gives the expectation exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from expertmesh.model_config import GateConfig, ModelConfig
from expertmesh.placement import expert_share


@dataclass(frozen=True)
class Traffic:
    """What travels for one token with a number of expert workers, all MoE layers together."""

    num_workers: int
    rows_out: float
    """Expected rows to expert workers; for a token alone also the number of messages."""
    rows_back: int
    nbytes_out: float
    """Of the rows out: elements alone, without ids and framing (some tens of bytes a message)."""
    nbytes_back: int


def traffic(config: ModelConfig, num_workers: int, itemsize: int) -> Traffic:
    """Expected traffic of a token whose gates choose evenly.

    Args:
        config: The model.
        num_workers: Expert workers, each with an even share of the experts of every layer.
        itemsize: Bytes of an element as it travels.
    """
    shares = [expert_share(i, num_workers, config.num_experts) for i in range(num_workers)]
    gates = [config.moe_ffn(layer).gate for layer in config.moe_layers]
    expected = {gate: expected_workers(gate, shares) for gate in set(gates)}
    rows_out = sum(expected[gate] for gate in gates)
    rows_back = sum(gate.top_k for gate in gates)
    row = config.hidden_size * itemsize
    return Traffic(num_workers, rows_out, rows_back, rows_out * row, rows_back * row)


def expected_workers(gate: GateConfig, shares: Sequence[range]) -> float:
    """Expert workers that a token visits in a layer, if every choice that the gate can make is
    equally likely.

    The gate first limits the choice to `top_groups` of `num_groups` groups of neighbouring experts.
    """
    return sum(1 - _chance_of_none(gate, share) for share in shares)


def _chance_of_none(gate: GateConfig, share: range) -> float:
    """Chance that no chosen expert is in the share: a sum over the choices of groups, of which only
    the number of experts of the share in them matters."""
    size = gate.num_experts // gate.num_groups
    held = [_overlap(share, range(i * size, (i + 1) * size)) for i in range(gate.num_groups)]
    whole, none = held.count(size), held.count(0)
    parts = [n for n in held if 0 < n < size]  # a range cuts two groups at most
    chance = 0.0
    for cut in _subsets(parts):
        for num_whole in range(min(whole, gate.top_groups) + 1):
            num_none = gate.top_groups - len(cut) - num_whole
            num_held = num_whole * size + sum(cut)
            chance += math.exp(
                _log_comb(whole, num_whole)
                + _log_comb(none, num_none)
                - _log_comb(gate.num_groups, gate.top_groups)
                + _log_comb(gate.top_groups * size - num_held, gate.top_k)
                - _log_comb(gate.top_groups * size, gate.top_k)
            )
    return chance


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def _log_comb(n: int, k: int) -> float:
    """Logarithm of the number of choices of k out of n; minus infinity if there is none."""
    if not 0 <= k <= n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _overlap(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))
