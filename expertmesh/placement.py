"""Which expert workers hold which experts: an immutable map, replaced whole.

Owner: the gateway's discovery makes maps; the engine and the attention worker only read them, so
no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertmesh.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertWorkerEntry:
    """A routable expert worker and the experts that it may be asked for."""

    worker_id: str
    address: str
    """host:port of its ExpertService."""
    incarnation: int
    resident: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer to experts, ascending; retiring experts are left out."""
    row_credits: int = 0
    leaving: bool = False
    """It is about to end: its copies are used only for experts without another one."""


@dataclass(frozen=True)
class ExpertMap:
    """(layer, expert) to expert workers, in one version.

    `choice[layer_slot, expert]` is the index in `workers` of the copy to use, or -1; layer_slot is
    the position of the layer in `moe_layers`.
    """

    epoch: int
    moe_layers: tuple[int, ...]
    num_experts: int
    workers: tuple[ExpertWorkerEntry, ...] = ()

    @staticmethod
    def empty(config: ModelConfig) -> ExpertMap:
        """The map before any expert worker is known: epoch 0."""
        return ExpertMap(epoch=0, moe_layers=config.moe_layers, num_experts=config.num_experts)

    def replaced(self, workers: Iterable[ExpertWorkerEntry]) -> ExpertMap:
        """The next version with these expert workers, ordered by id."""
        ordered = tuple(sorted(workers, key=lambda worker: worker.worker_id))
        return ExpertMap(self.epoch + 1, self.moe_layers, self.num_experts, ordered)

    @cached_property
    def layer_slots(self) -> dict[int, int]:
        """Layer to its row in `choice`."""
        return {layer: slot for slot, layer in enumerate(self.moe_layers)}

    @cached_property
    def choice(self) -> npt.NDArray[np.int32]:
        """[MoE layers, experts] index of the copy to use; -1 without one.

        Copies of an expert take turns by expert number, so that experts with the same holders
        spread over them.
        """
        table = np.full((len(self.moe_layers), self.num_experts), -1, dtype=np.int32)
        for (layer, expert), holders in self.holders.items():
            workers = self.staying(holders)
            table[self.layer_slots[layer], expert] = workers[expert % len(workers)]
        return table

    def staying(self, holders: Sequence[int]) -> Sequence[int]:
        """Those of some expert workers that are not leaving; all of them if all are."""
        return [index for index in holders if not self.workers[index].leaving] or holders

    @cached_property
    def holders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(layer, expert) to the indices of the expert workers that hold it, ascending."""
        found: dict[tuple[int, int], list[int]] = {}
        for index, worker in enumerate(self.workers):
            for layer, experts in worker.resident.items():
                for expert in experts:
                    found.setdefault((layer, expert), []).append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    def uncovered(self) -> dict[int, tuple[int, ...]]:
        """Layer to its experts without a usable copy; empty if all are covered."""
        missing: dict[int, tuple[int, ...]] = {}
        for slot, layer in enumerate(self.moe_layers):
            experts = np.flatnonzero(self.choice[slot] < 0)
            if experts.size:
                missing[layer] = tuple(int(expert) for expert in experts)
        return missing

    @property
    def num_covered(self) -> int:
        """(layer, expert) pairs with a usable copy."""
        return int((self.choice >= 0).sum())

    @property
    def num_pairs(self) -> int:
        """(layer, expert) pairs of the model."""
        return len(self.moe_layers) * self.num_experts


def expert_share(index: int, num_shares: int, num_experts: int) -> range:
    """The experts of one of `num_shares` contiguous shares, whose sizes differ by one at most."""
    first, last = (num_experts * i // num_shares for i in (index, index + 1))
    return range(first, last)


def missing_pairs(uncovered: dict[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Flattens `ExpertMap.uncovered()` to (layer, expert) pairs."""
    return [(layer, expert) for layer, experts in uncovered.items() for expert in experts]
