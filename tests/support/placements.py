"""Expert workers as placement sees them, and what becomes of them as plans are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gateway.placement.state import ExpertKey, ExpertLoad, Experts, Order, Placement, WorkerView


def some_experts(num_layers: int = 2, num_experts: int = 8) -> Experts:
    """Layers 1, 3, 5, ... of a model."""
    return Experts(tuple(range(1, 2 * num_layers, 2)), num_experts, 1000)


def some_workers(
    num_workers: int, num_slots: int, *, num_nodes: int | None = None, prefix: str = "w"
) -> list[WorkerView]:
    """Empty ones, each on a node of its own unless nodes are counted."""
    nodes = num_nodes or num_workers
    return [
        WorkerView(f"{prefix}{i}", 100 + i, f"node{i % nodes}", num_slots)
        for i in range(num_workers)
    ]


def carried_out(workers: Sequence[WorkerView], target: Placement) -> list[WorkerView]:
    """Workers that hold what was planned, and nothing else."""
    return [
        replace(view, resident=target.get(view.worker_id, frozenset()), retiring=frozenset())
        for view in workers
    ]


def obeyed(workers: Sequence[WorkerView], orders: Sequence[Order]) -> list[WorkerView]:
    """Workers after they did what they were told."""
    done = []
    for view in workers:
        resident = set(view.resident)
        for order in orders:
            if (order.worker_id, order.incarnation) == (view.worker_id, view.incarnation):
                change = resident.update if order.kind == "load" else resident.difference_update
                change(order.experts)
        done.append(replace(view, resident=frozenset(resident)))
    return done


def copies_of(workers: Sequence[WorkerView]) -> dict[ExpertKey, list[str]]:
    """Expert to the ids of the workers that hold it."""
    found: dict[ExpertKey, list[str]] = {}
    for view in workers:
        for key in view.resident:
            found.setdefault(key, []).append(view.worker_id)
    return found


def moved_copies(workers: Sequence[WorkerView], target: Placement) -> int:
    """Copies that have to be loaded."""
    return sum(len(target.get(view.worker_id, frozenset()) - view.resident) for view in workers)


def zipf_load(experts: Experts, exponent: float, seed: int) -> ExpertLoad:
    """A load in which the expert of rank r has 1 / r^exponent, in each layer another order."""
    generator = np.random.default_rng(seed)
    ranks_E = np.arange(1, experts.num_experts + 1, dtype=np.float64)
    load_E = 1e6 * experts.num_experts * ranks_E**-exponent / (ranks_E**-exponent).sum()
    return np.stack([generator.permutation(load_E) for _ in experts.moe_layers])
