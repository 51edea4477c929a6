"""An expert map together with the streams to its expert workers: immutable, replaced whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention_worker.expert_stream import ExpertStream
from expertmesh.errors import ExpertUnavailableError
from expertmesh.placement import ExpertMap

Tried = Mapping[int, set[int]]
"""Expert to the expert workers that failed it in this dispatch."""


class LayerTable(NamedTuple):
    """Where the rows of a layer go as long as all is well."""

    worker_of_expert_E: npt.NDArray[np.int32]
    """Index of the expert worker to ask for each expert."""
    has_copies_E: npt.NDArray[np.bool_]
    """Whether other expert workers hold the expert too."""


@dataclass(frozen=True)
class Routes:
    """Where a step's rows go."""

    expert_map: ExpertMap
    streams: tuple[ExpertStream, ...] = ()
    """One per expert worker of the map, in its order."""
    gateway: int = 0
    """Incarnation of the gateway whose map it is."""

    def table(self, layer: int) -> npt.NDArray[np.int32] | None:
        """[E] index of the expert worker to ask for each expert; None unless all is well."""
        slot = self.expert_map.layer_slots[layer]
        if not self._covered[slot]:
            return None
        for stream in self.streams:
            if stream.suspect or not stream.usable:
                return None
        table_E: npt.NDArray[np.int32] = self.expert_map.choice[slot]
        return table_E

    @cached_property
    def tables(self) -> Mapping[int, LayerTable]:
        """Of the layers of which every expert has a copy."""
        choice = self.expert_map.choice
        has_copies = np.zeros(choice.shape, np.bool_)
        slots = self.expert_map.layer_slots
        for (layer, expert), workers in self.expert_map.holders.items():
            has_copies[slots[layer], expert] = len(workers) > 1
        return {
            layer: LayerTable(choice[slot], has_copies[slot])
            for layer, slot in slots.items()
            if self._covered[slot]
        }

    def choose(
        self, layer: int, experts: Sequence[int], tried: Tried, *, detail: str = ""
    ) -> npt.NDArray[np.int32]:
        """[E] index of the expert worker to ask for each of `experts`; -1 for all others.

        Args:
            layer: An MoE layer.
            experts: Which experts.
            tried: Expert workers not to ask.
            detail: What failed before, for the error.

        Raises:
            ExpertUnavailableError: Some of them have no usable copy.
        """
        preferred_E: npt.NDArray[np.int32] = self.expert_map.choice[
            self.expert_map.layer_slots[layer]
        ]
        table_E = np.full(self.expert_map.num_experts, -1, dtype=np.int32)
        for expert in experts:
            table_E[expert] = self._choose_one(layer, expert, int(preferred_E[expert]), tried)
        missing = [(layer, expert) for expert in experts if table_E[expert] < 0]
        if missing:
            raise ExpertUnavailableError(missing, detail=detail or self._why(missing))
        return table_E

    def has_other_copies(
        self, layer: int, experts: Iterable[int], worker: int, tried: Tried
    ) -> bool:
        """True if each of the experts could be asked elsewhere too."""
        return all(
            any(other != worker for other in self._usable(layer, expert, tried))
            for expert in experts
        )

    @cached_property
    def has_copies(self) -> bool:
        """True if any expert is on more than one expert worker."""
        return any(len(holders) > 1 for holders in self.expert_map.holders.values())

    @cached_property
    def _covered(self) -> list[bool]:
        """By MoE layer: every expert has a copy."""
        return [bool((workers_E >= 0).all()) for workers_E in self.expert_map.choice]

    def name(self, worker: int) -> str:
        """An expert worker, for messages."""
        entry = self.streams[worker].worker
        return f"expert worker {entry.worker_id} at {entry.address}"

    def _choose_one(self, layer: int, expert: int, preferred: int, tried: Tried) -> int:
        usable = self._usable(layer, expert, tried)
        if preferred in usable:
            return preferred
        return usable[expert % len(usable)] if usable else -1

    def _usable(self, layer: int, expert: int, tried: Tried) -> list[int]:
        """Expert workers to ask; who let a call time out, or leaves, only for want of others."""
        failed = tried.get(expert, ())
        holders = self.expert_map.holders.get((layer, expert), ())
        usable = [i for i in holders if i not in failed and self.streams[i].usable]
        trusted = [i for i in usable if not self.streams[i].suspect] or usable
        return list(self.expert_map.staying(trusted))

    def _why(self, missing: Sequence[tuple[int, int]]) -> str:
        holders = {index for pair in missing for index in self.expert_map.holders.get(pair, ())}
        if not holders:
            return "no expert worker holds it" if self.streams else "no expert worker is known"
        return "; ".join(self.streams[index].describe() for index in sorted(holders))
