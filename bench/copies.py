"""How good and how quick the choice among copies is: `python -m bench.copies [--repeat N]`.

For a batch whose experts follow Zipf's law, and expert workers that hold random copies: distinct
experts on the busiest expert worker, compared with the fewest that are possible and with a choice
made once for all dispatches; its rows, compared with what cannot be beaten; microseconds a choice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertmesh_kernels.cpu.copies import NUM_EXPERTS, choose_copies

ZIPF_EXPONENT = 1.2
NUM_BATCHES = 40
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """A mesh and a batch."""

    num_rows: int
    num_experts: int
    top_k: int
    num_workers: int
    num_copies: int


SHAPES = (
    Shape(1, 32, 4, 3, 2),
    Shape(64, 32, 4, 3, 2),
    Shape(64, 128, 8, 4, 2),
    Shape(64, 256, 8, 8, 2),
    Shape(64, 256, 8, 16, 3),
    Shape(64, 256, 8, 4, 4),
    Shape(1024, 32, 4, 3, 2),
    Shape(1024, 256, 8, 8, 2),
)


def measure(shape: Shape, repeat: int) -> tuple[float, float, float, float]:
    """Worst against the fewest experts, mean of a fixed choice against them, median rows and us."""
    rng = np.random.default_rng(0)
    found, fixed, rows, took_us = [], [], [], []
    for _ in range(NUM_BATCHES):
        rows_E = zipf_rows(rng, shape)
        copies_ER = random_copies(rng, shape)
        cost_W, queue_W = (
            np.ones(shape.num_workers, np.int64),
            np.zeros(shape.num_workers, np.int64),
        )
        worker_of_expert_E = np.empty(shape.num_experts, np.int32)
        asked_W2 = np.zeros((shape.num_workers, 2), np.int64)
        arguments = rows_E, copies_ER, cost_W, 0, queue_W, worker_of_expert_E, asked_W2
        choose_copies(*arguments)
        started_s = time.perf_counter()
        for _ in range(repeat):
            choose_copies(*arguments)
        took_us.append((time.perf_counter() - started_s) / repeat * 1e6)
        best = fewest(np.flatnonzero(rows_E).tolist(), copies_ER, shape.num_workers)
        first_W = np.bincount(copies_ER[rows_E > 0, 0], minlength=shape.num_workers)
        rows_W = np.bincount(worker_of_expert_E[rows_E > 0], rows_E[rows_E > 0])
        found.append(asked_W2[:, NUM_EXPERTS].max() / best)
        fixed.append(first_W.max() / best)
        rows.append(rows_W.max() / max(rows_E.sum() / shape.num_workers, rows_E.max()))
    return max(found), statistics.mean(fixed), statistics.median(rows), statistics.median(took_us)


def zipf_rows(rng: np.random.Generator, shape: Shape) -> Ints:
    """Rows of each expert, where the n-th most popular is chosen with a share of 1 / n^1.2."""
    share = 1 / np.arange(1, shape.num_experts + 1) ** ZIPF_EXPONENT
    share = rng.permutation(share / share.sum())
    ids = [
        rng.choice(shape.num_experts, shape.top_k, replace=False, p=share)
        for _ in range(shape.num_rows)
    ]
    return np.bincount(np.concatenate(ids), minlength=shape.num_experts)


def random_copies(rng: np.random.Generator, shape: Shape) -> npt.NDArray[np.int32]:
    """[E, R] who holds each expert."""
    everyone = [rng.permutation(shape.num_workers) for _ in range(shape.num_experts)]
    return np.array(everyone, np.int32)[:, : shape.num_copies].copy()


def fewest(asked: list[int], copies_ER: npt.NDArray[np.int32], num_workers: int) -> int:
    """Fewest experts that the busiest expert worker can have, by augmenting paths.

    Args:
        asked: Experts with rows.
        copies_ER: Who holds them.
        num_workers: Expert workers.
    """
    limit = -(-len(asked) // num_workers)
    while not _fits(asked, copies_ER, limit):
        limit += 1
    return limit


def _fits(asked: list[int], copies_ER: npt.NDArray[np.int32], limit: int) -> bool:
    held: dict[int, list[int]] = {}

    def place(expert: int, seen: set[int]) -> bool:
        for worker in {*copies_ER[expert].tolist()} - seen:
            seen.add(worker)
            there = held.setdefault(worker, [])
            if len(there) < limit:
                there.append(expert)
                return True
            for index, other in enumerate(there):
                if place(other, seen):
                    there[index] = expert
                    return True
        return False

    return all(place(expert, set()) for expert in asked)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=200, help="choices to time for each batch")
    repeat = parser.parse_args().repeat
    print("rows experts top-k workers copies | experts/best  fixed/best  rows/bound  us")
    for shape in SHAPES:
        found, fixed, rows, took_us = measure(shape, repeat)
        print(
            f"{shape.num_rows:>4}{shape.num_experts:>8}{shape.top_k:>6}{shape.num_workers:>8}"
            f"{shape.num_copies:>7} |{found:>13.2f}{fixed:>12.2f}{rows:>12.2f}{took_us:>6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
