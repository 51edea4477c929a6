"""Which expert workers hold which experts: an immutable map, replaced whole.

Owner: the gateway's discovery makes maps; the engine and the attention worker only read them, so
no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    Arrays [S, E, ...] are by layer slot, the position of the layer in `moe_layers`, and expert;
    they name expert workers by their index in `workers`, nobody by -1. W expert workers, R copies
    of an expert at most.
    """

    epoch: int
    moe_layers: tuple[int, ...]
    num_experts: int
    workers: tuple[ExpertWorkerEntry, ...] = ()

    @staticmethod
    def empty(config: ModelConfig) -> ExpertMap:
        """The map before any expert worker is known: epoch 0."""
        return ExpertMap(epoch=0, moe_layers=config.moe_layers, num_experts=config.num_experts)

    def prepare(self) -> None:
        """Makes what is looked up later, so that nobody has to wait for that."""
        assert self.choice.shape == self.copies_SER.shape[:2]

    def replaced(self, workers: Iterable[ExpertWorkerEntry]) -> ExpertMap:
        """The next version with these expert workers, ordered by id."""
        ordered = tuple(sorted(workers, key=lambda worker: worker.worker_id))
        return ExpertMap(self.epoch + 1, self.moe_layers, self.num_experts, ordered)

    @cached_property
    def layer_slots(self) -> dict[int, int]:
        """Layer to its slot."""
        return {layer: slot for slot, layer in enumerate(self.moe_layers)}

    @cached_property
    def choice(self) -> npt.NDArray[np.int32]:
        """[S, E] the copy to use if all else is equal."""
        return np.ascontiguousarray(self.copies_SER[:, :, 0])

    @cached_property
    def copies_SER(self) -> npt.NDArray[np.int32]:
        """[S, E, R] all copies, in the order to use them if all else is equal; at least one column.

        Copies of an expert take turns by expert number, so that experts with the same holders
        spread over them; those of expert workers that are leaving come last.
        """
        held_WSE = self._held_WSE
        leaving_W = np.array([worker.leaving for worker in self.workers], np.bool_)
        num_copies = max(1, int(held_WSE.sum(axis=0).max(initial=0)))
        copies_SER = np.full((*held_WSE.shape[1:], num_copies), -1, np.int32)
        first_SE = np.zeros(held_WSE.shape[1:], np.int64)
        for group_W in (~leaving_W, leaving_W):
            held_GSE = held_WSE[group_W]
            count_SE = held_GSE.sum(axis=0)
            turn_GSE = np.cumsum(held_GSE, axis=0) - 1 - np.arange(self.num_experts)
            place_GSE = first_SE + turn_GSE % np.maximum(count_SE, 1)
            index_G, slot, expert = np.nonzero(held_GSE)
            copies_SER[slot, expert, place_GSE[held_GSE]] = np.flatnonzero(group_W)[index_G]
            first_SE += count_SE
        return copies_SER

    @cached_property
    def _held_WSE(self) -> npt.NDArray[np.bool_]:
        shape = len(self.workers), len(self.moe_layers), self.num_experts
        held_WSE = np.zeros(shape, np.bool_)
        for index, worker in enumerate(self.workers):
            for layer, experts in worker.resident.items():
                held_WSE[index, self.layer_slots[layer], list(experts)] = True
        return held_WSE

    @cached_property
    def holders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(layer, expert) to the indices of the expert workers that hold it, ascending."""
        found: dict[tuple[int, int], list[int]] = {}
        for slot, expert, index in np.argwhere(self._held_WSE.transpose(1, 2, 0)).tolist():
            found.setdefault((self.moe_layers[slot], expert), []).append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    def only_adds_copies_to(self, old: ExpertMap) -> bool:
        """True if it has what the map before had, and beside that further copies of it alone.

        Args:
            old: A map of the same expert workers.
        """
        before_WSE, now_WSE = old._held_WSE, self._held_WSE
        is_kept = not (before_WSE & ~now_WSE).any()
        return is_kept and bool((before_WSE.any(axis=0) == now_WSE.any(axis=0)).all())

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


def missing_pairs(uncovered: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Flattens `ExpertMap.uncovered()` to (layer, expert) pairs."""
    return [(layer, expert) for layer, experts in uncovered.items() for expert in experts]
