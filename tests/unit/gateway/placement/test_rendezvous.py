"""Rendezvous hashing with bounded load: even, complete, and stable when workers come and go."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.placement.arrays import slots_of
from gateway.placement.rendezvous import base_placement, fair_shares, pair_scores
from tests.support.placements import some_experts, some_workers


def test_scores_are_those_of_names() -> None:
    """A score depends on worker, layer and expert alone: the same in each process and version."""
    experts = some_experts(2, 3)
    scores_LEW = pair_scores(experts, some_workers(2, 5))
    assert (pair_scores(experts, some_workers(5, 5))[:, :, :2] == scores_LEW).all()
    assert scores_LEW[0, 0, 0] == pytest.approx(1.815731609)
    assert len(np.unique(scores_LEW)) == scores_LEW.size


def test_without_bounds_weights_are_shares() -> None:
    """A worker with three times the slots is the best one three times as often."""
    experts = some_experts(20, 200)
    workers = [*some_workers(1, 300), *some_workers(1, 100, prefix="x")]
    first = pair_scores(experts, workers).argmax(axis=2) == 0
    assert first.mean() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("num_experts", [1, 3, 8, 60, 61])
@pytest.mark.parametrize("num_copies", [1, 2, 3])
def test_layers_are_spread_evenly(num_workers: int, num_experts: int, num_copies: int) -> None:
    """Of each layer, no worker has more than one expert more than another; all copies are there."""
    if num_copies > num_workers:
        return
    experts = some_experts(3, num_experts)
    holds_LEW = base_placement(experts, some_workers(num_workers, 1000), num_copies)
    assert (holds_LEW.sum(axis=2) == num_copies).all()
    sizes_LW = holds_LEW.sum(axis=1)
    assert (sizes_LW.max(axis=1) - sizes_LW.min(axis=1) <= 1).all()


@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_exactly_as_many_slots_as_copies(num_workers: int) -> None:
    """Where every slot is needed, every slot is used and no worker has too much."""
    experts = some_experts(5, 13)
    total = 2 * experts.num_pairs
    slots = [total // num_workers + (i < total % num_workers) for i in range(num_workers)]
    workers = [some_workers(1, n, prefix=f"w{i}-")[0] for i, n in enumerate(slots)]
    holds_LEW = base_placement(experts, workers, 2)
    assert holds_LEW.sum(axis=(0, 1)).tolist() == slots
    assert (holds_LEW.sum(axis=2) == 2).all()


def test_a_joining_worker_changes_little_of_the_base() -> None:
    """From nothing, W+1 workers share as W did, but for a part of at most 2.7 / (W + 1).

    1/(W+1) is the least. Bounded load costs the rest: who is full sends experts on to others. Plans
    for a running mesh begin with what is there instead, and move the least.
    """
    experts = some_experts(4, 64)
    for num_workers in (1, 2, 3, 7, 15):
        for seed in range(20):
            workers = some_workers(num_workers + 1, 256, prefix=f"{seed}-")
            before_LEW = base_placement(experts, workers[:-1], 1)
            after_LEW = base_placement(experts, workers, 1)
            new = after_LEW[:, :, -1].sum() + (after_LEW[:, :, :-1] & ~before_LEW).sum()
            assert new / after_LEW.sum() <= 2.7 / (num_workers + 1)


def test_shares_follow_slots_and_what_is_held() -> None:
    """In proportion to slots; fractions go to those that hold more already."""
    slots_W = np.array([100, 100, 200])
    copies_L = np.array([8, 8])
    none_LW = np.zeros((2, 3), dtype=np.int64)
    assert fair_shares(copies_L, slots_W, 100, none_LW).tolist() == [[2, 2, 4], [2, 2, 4]]
    held_LW = np.array([[2, 3, 4], [3, 2, 4]])
    assert fair_shares(copies_L + 1, slots_W, 100, held_LW).tolist() == [[2, 3, 4], [3, 2, 4]]
    assert fair_shares(copies_L, slots_W, 3, none_LW).tolist() == [[3, 3, 2], [3, 2, 3]]


def test_a_worker_without_slots_gets_nothing() -> None:
    """Its scores are below all others, and its share is 0."""
    experts = some_experts()
    workers = [*some_workers(2, 16), *some_workers(1, 0, prefix="x")]
    assert (slots_of(workers) == [16, 16, 0]).all()
    assert base_placement(experts, workers, 2)[:, :, 2].sum() == 0
