"""The words of placement: what is there, what is wanted, what is ordered.

All of it is immutable. What expert workers report is the only truth; a plan says what would be
better, and an order what an expert worker is to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

ExpertKey = tuple[int, int]
"""(layer, expert)."""
Placement = Mapping[str, frozenset[ExpertKey]]
"""Worker id to its experts."""
ExpertLoad = npt.NDArray[np.float64]
"""[MoE layers, experts] (row, expert) pairs of late, not negative; the order of `moe_layers`."""


@dataclass(frozen=True)
class Experts:
    """What there is to place."""

    moe_layers: tuple[int, ...]
    num_experts: int
    """Of each layer."""
    expert_nbytes: int
    """Bytes of the weights of one expert."""

    @property
    def num_pairs(self) -> int:
        """(layer, expert) pairs of the model."""
        return len(self.moe_layers) * self.num_experts

    def keys(self) -> frozenset[ExpertKey]:
        """All (layer, expert) pairs."""
        return frozenset(product(self.moe_layers, range(self.num_experts)))

    def no_load(self) -> ExpertLoad:
        """The load before anything was measured."""
        return np.zeros((len(self.moe_layers), self.num_experts))


@dataclass(frozen=True)
class WorkerView:
    """What is known of one expert worker."""

    worker_id: str
    incarnation: int
    node: str
    """The machine; copies on different nodes do not die together."""
    num_slots: int
    """Experts, of all layers together, that fit; those that are retiring still take theirs."""
    resident: frozenset[ExpertKey] = frozenset()
    """Can be used."""
    retiring: frozenset[ExpertKey] = frozenset()
    """Still in memory, to be used no more; a load brings such an expert back at once."""
    leaving: bool = False
    """It was told to stop: it serves what it holds until that is elsewhere."""
    absent: bool = False
    """It was lost a moment ago and may come back. It has a share of the plan and gets no orders."""
    fenced: bool = True
    """It has heard of this leader, so it obeys no earlier one, not even if an order comes late."""
    failed: frozenset[ExpertKey] = frozenset()
    """Not resident, and not to be loaded here for now, as that failed."""
    wrong: frozenset[ExpertKey] = frozenset()
    """Read here from other bytes than the gateway's checkpoint has. They are among `failed`, and
    while they are in memory among `retiring`: to be unloaded."""


@dataclass(frozen=True)
class PlacementPolicy:
    """How much is moved, and for what.

    Raises:
        ValueError: A value is out of range.
    """

    min_copies: int = 2
    """Copies of each expert, on different workers, as far as workers and slots allow."""
    gain: float = 0.10
    """Nothing is moved for load unless layers get at least this much faster."""
    prior_pairs: float = 100.0
    """Pairs that each expert is given beside its measured load: few pairs say little."""
    bytes_per_minute: int = 64 << 30
    """Of weights loaded for balance and further copies, over all workers together."""
    loads_at_a_time: int = 32
    """Experts that a worker may have been told to load and has not loaded yet."""
    balance_every_s: float = 10.0
    """How often load is looked at; plans for other reasons are made at once."""
    lost_copy_patience_s: float = 10.0
    """How long the share of a lost worker waits for it, but for experts without another copy."""

    def __post_init__(self) -> None:
        for name, least in (
            ("min_copies", 1),
            ("gain", 0.0),
            ("prior_pairs", 0.0),
            ("bytes_per_minute", 1),
            ("loads_at_a_time", 1),
            ("balance_every_s", 0.0),
            ("lost_copy_patience_s", 0.0),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {value}, expected at least {least}")


@dataclass(frozen=True)
class Rescale:
    """A change of the number of expert workers, as far as placement has to know."""

    leaving: frozenset[str] = frozenset()
    """Ids of those that are to hand over, although they were not told to stop yet."""
    is_under_way: bool = False
    """Expert workers are about to come or go: nothing is moved for load."""


@dataclass(frozen=True)
class Order:
    """What one incarnation of an expert worker is to load or to unload."""

    kind: Literal["load", "unload"]
    worker_id: str
    incarnation: int
    experts: tuple[ExpertKey, ...]
    """Most urgent first. None at all: the worker is to hear of the leader, nothing else."""
    token: int = 0
    """Fencing token of the leader who gives it."""


@dataclass(frozen=True)
class Plan:
    """Who should hold what."""

    target: Placement
    """Of every worker that is not leaving, absent ones included."""
    uncovered: tuple[ExpertKey, ...]
    """Experts without a copy that can be used now, ascending."""
    unplaced: tuple[ExpertKey, ...]
    """Experts that find no free slot anywhere, or cannot be loaded where one is; ascending."""
    imbalance_before: float
    """Time of the slowest worker to the mean, over all layers, as experts are resident now."""
    imbalance_after: float
    """The same once the plan is carried out."""
    why: str
    """For people: what is moved for which reason; empty if nothing is to be done."""

    def num_copies(self) -> dict[ExpertKey, int]:
        """Planned copies of each expert that has any."""
        copies: dict[ExpertKey, int] = {}
        for experts in self.target.values():
            for key in experts:
                copies[key] = copies.get(key, 0) + 1
        return copies
