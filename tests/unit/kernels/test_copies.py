"""The choice among copies: as few distinct experts on the busiest expert worker as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from bench.copies import Shape, fewest, random_copies, zipf_rows
from expertmesh_kernels.cpu.call_times import TYPICAL
from expertmesh_kernels.cpu.copies import (
    LEAVING,
    NUM_EXPERTS,
    NUM_SOLE,
    SUSPECT,
    UNUSABLE,
    choose_copies,
    set_costs,
)

Ints = npt.NDArray[np.int64]
MOST_UNEVEN_ROWS = 1.25
"""Rows of the busiest expert worker, where all are needed, compared with what cannot be beaten."""


def choose(
    rows_E: Ints,
    copies_ER: npt.NDArray[np.int32],
    cost_W: Ints,
    queue_W: Ints | None = None,
    *,
    call_experts: int = 0,
) -> tuple[list[int], list[list[int]]] | None:
    """The choice and its counts; None if there is none."""
    worker_of_expert_E = np.full(len(rows_E), 99, np.int32)
    asked_W2 = np.full((len(cost_W), 2), 99, np.int64)
    if queue_W is None:
        queue_W = np.zeros_like(cost_W)
    if not choose_copies(
        rows_E, copies_ER, cost_W, call_experts, queue_W, worker_of_expert_E, asked_W2
    ):
        return None
    return worker_of_expert_E.tolist(), asked_W2.tolist()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 32, 4, 3, 2),
        Shape(64, 32, 4, 3, 2),
        Shape(64, 256, 8, 8, 2),
        Shape(64, 128, 8, 16, 3),
        Shape(4, 60, 4, 4, 4),
    ],
)
def test_no_choice_has_fewer_experts_on_the_busiest_expert_worker(shape: Shape) -> None:
    """Under Zipf's routing and any placement it is the optimum, and the same each time."""
    rng = np.random.default_rng(shape.num_rows + shape.num_experts)
    cost_W = np.ones(shape.num_workers, np.int64)
    for _ in range(8):
        rows_E, copies_ER = zipf_rows(rng, shape), random_copies(rng, shape)
        chosen = choose(rows_E, copies_ER, cost_W)
        assert chosen is not None
        workers, asked = chosen
        assert chosen == choose(rows_E, copies_ER, cost_W, call_experts=5)
        for expert, worker in enumerate(workers):
            assert worker in copies_ER[expert] if rows_E[expert] else worker == -1
        counts = [workers.count(worker) for worker in range(shape.num_workers)]
        assert [line[NUM_EXPERTS] for line in asked] == counts
        assert [line[NUM_SOLE] for line in asked] == [0] * shape.num_workers
        wanted = np.flatnonzero(rows_E).tolist()
        assert max(counts) == fewest(wanted, copies_ER, shape.num_workers)


def test_rows_of_prompts_are_spread() -> None:
    """Where every expert is needed, rows are nearly as even as they can be."""
    rng = np.random.default_rng(3)
    shape = Shape(256, 32, 4, 3, 2)
    for _ in range(20):
        rows_E, copies_ER = zipf_rows(rng, shape), random_copies(rng, shape)
        chosen = choose(rows_E, copies_ER, np.ones(3, np.int64))
        assert chosen is not None
        rows_W = np.bincount(chosen[0], rows_E, 3)
        assert rows_W.max() <= MOST_UNEVEN_ROWS * max(rows_E.sum() / 3, rows_E.max())


def test_who_cannot_be_asked_is_not() -> None:
    """Unusable expert workers get nothing; leaving and suspect ones only what nobody else has."""
    rows_E = np.array([3, 1, 0, 2], np.int64)
    copies_ER = np.array([[0, 1, 2], [1, 2, -1], [0, -1, -1], [1, -1, -1]], np.int32)
    for cost in (LEAVING, SUSPECT):
        asked = [[0, 0], [1, 1], [2, 0]] if cost == LEAVING else [[0, 0], [1, 1], [2, 2]]
        chosen = choose(rows_E, copies_ER, np.array([UNUSABLE, cost, 1]))
        assert chosen == ([2, 2, -1, 1], asked)
    assert choose(rows_E, copies_ER, np.array([1, UNUSABLE, 1])) is None
    assert choose(rows_E, np.full((4, 1), -1, np.int32), np.ones(3, np.int64)) is None


def test_a_shorter_queue_comes_last() -> None:
    """If experts and rows are even, who waits less is asked; else who comes first."""
    rows_E, copies_ER = np.array([1], np.int64), np.array([[1, 0]], np.int32)
    cost_W = np.ones(2, np.int64)
    assert choose(rows_E, copies_ER, cost_W) == ([1], [[0, 0], [1, 0]])
    assert choose(rows_E, copies_ER, cost_W, np.array([3, 5])) == ([0], [[1, 0], [0, 0]])


def test_slow_expert_workers_get_fewer_experts() -> None:
    """One that is four times as slow gets a fifth; one that is a little slower as many."""
    cost_W = np.zeros(3, np.int64)
    set_costs(np.array([TYPICAL * 4, 0, TYPICAL]), np.array([1, 1, 1]), cost_W)
    assert cost_W.tolist() == [4, UNUSABLE, 1]
    rows_E, copies_ER = np.ones(20, np.int64), np.tile(np.array([0, 1, 2], np.int32), (20, 1))
    chosen = choose(rows_E, copies_ER, cost_W)
    assert chosen is not None
    assert chosen[1] == [[4, 0], [0, 0], [16, 0]]
    set_costs(np.array([TYPICAL * 19 // 10, TYPICAL]), np.array([1, LEAVING]), cost_W[:2])
    assert cost_W[:2].tolist() == [1, LEAVING]


@pytest.mark.parametrize(("call_experts", "asked"), [(0, [16, 4]), (3, [18, 2]), (8, [20, 0])])
def test_a_slow_expert_worker_is_left_alone_if_a_call_costs_more(
    call_experts: int, asked: list[int]
) -> None:
    """Twenty experts, and a copy of each on one that takes four times as long."""
    cost_W = np.array([1, 4])
    copies_ER = np.tile(np.array([0, 1], np.int32), (20, 1))
    chosen = choose(np.ones(20, np.int64), copies_ER, cost_W, call_experts=call_experts)
    assert chosen is not None
    assert [line[NUM_EXPERTS] for line in chosen[1]] == asked


def test_no_choice_makes_a_mesh_less_busy() -> None:
    """Whatever expert workers cost and hold; compared with all choices there are."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        num_workers = int(rng.integers(2, 4))
        cost_W, call_experts = 2 ** rng.integers(0, 4, num_workers), int(rng.integers(0, 6))
        everyone = [rng.permutation(num_workers) for _ in range(5)]
        copies_ER = np.array(everyone, np.int32)[:, : int(rng.integers(1, num_workers + 1))].copy()
        chosen = choose(np.ones(5, np.int64), copies_ER, cost_W, call_experts=call_experts)
        assert chosen is not None
        choices = product(*copies_ER.tolist())
        least = min(busiest(workers, cost_W, call_experts) for workers in choices)
        assert busiest(chosen[0], cost_W, call_experts) == least


def busiest(workers: Sequence[int], cost_W: Ints, call_experts: int) -> int:
    """How busy the busiest is if these are asked for an expert each."""
    num_W = np.bincount(workers, minlength=len(cost_W))
    return int(((num_W + call_experts) * (num_W > 0) * cost_W).max())
