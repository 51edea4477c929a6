"""An expert map together with the streams to its expert workers: immutable, replaced whole.

E experts, R copies of an expert at most, W expert workers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention_worker.call_times import TYPICAL, CallTimes, size_class
from attention_worker.expert_stream import ExpertStream
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import ModelConfig
from expertmesh.placement import ExpertMap
from expertmesh_kernels.cpu import copies as cpu

Tried = Mapping[int, set[int]]
"""Expert to the expert workers that failed it in this dispatch."""
Ints = npt.NDArray[np.int64]


class LayerTable(NamedTuple):
    """Where rows of a layer go, as compiled code takes it."""

    is_fixed: bool
    """Each expert has one copy."""
    worker_of_expert_E: npt.NDArray[np.int32]
    """Index of the expert worker to ask then."""
    copies_ER: npt.NDArray[np.int32]
    """Indices of the expert workers that hold each expert; -1 is none."""
    penalty_W: Ints
    """What an expert costs on each expert worker, beside how slow it is."""


@dataclass(frozen=True)
class Assignment:
    """Which expert worker each expert is asked of, and what that makes."""

    worker_of_expert_E: npt.NDArray[np.int32]
    """-1 for experts that nobody is asked for."""
    asked_W2: Ints
    """Distinct experts of each expert worker, and those that cannot well be asked elsewhere."""

    def num_experts(self, worker: int) -> int:
        """Distinct experts of an expert worker."""
        return int(self.asked_W2[worker, cpu.NUM_EXPERTS])

    def may_move(self, worker: int) -> bool:
        """True if others could be asked for all of its experts."""
        return not self.asked_W2[worker, cpu.NUM_SOLE]


@dataclass(frozen=True)
class Routes:
    """Where a step's rows go."""

    expert_map: ExpertMap
    streams: tuple[ExpertStream, ...] = ()
    """One per expert worker of the map, in its order."""
    gateway: int = 0
    """Incarnation of the gateway whose map it is."""

    @cached_property
    def tables(self) -> Mapping[int, LayerTable]:
        """By layer."""
        copies_SER, choice_SE = self.expert_map.copies_SER, self.expert_map.choice
        has_one_SE = (choice_SE >= 0) & (copies_SER[:, :, 1:] < 0).all(axis=2)
        return {
            layer: LayerTable(
                bool(has_one_SE[slot].all()), choice_SE[slot], copies_SER[slot], self._penalty_W
            )
            for layer, slot in self.expert_map.layer_slots.items()
        }

    @cached_property
    def _penalty_W(self) -> Ints:
        workers = self.expert_map.workers
        return np.array([cpu.LEAVING if worker.leaving else 1 for worker in workers], np.int64)

    def choose(
        self, layer: int, rows_E: Ints, tried: Tried, call_experts: int
    ) -> tuple[Assignment, list[int]]:
        """Which expert worker to ask for each expert with rows; experts that nobody can serve.

        Args:
            layer: An MoE layer.
            rows_E: Rows of each expert.
            tried: Expert workers not to ask.
            call_experts: What a call costs before its first expert, in experts.
        """
        copies_ER = self.tables[layer].copies_ER
        if tried:
            copies_ER = copies_ER.copy()
            for expert, workers in tried.items():
                copies_ER[expert][np.isin(copies_ER[expert], list(workers))] = -1
        cost_W = self._cost_W()
        can_ask_E = ((copies_ER >= 0) & (np.append(cost_W, 0)[copies_ER] > 0)).any(axis=1)
        missing = np.flatnonzero((rows_E > 0) & ~can_ask_E).tolist()
        worker_of_expert_E = np.empty(len(rows_E), np.int32)
        asked_W2 = np.zeros((len(cost_W), 2), np.int64)
        queue_W = np.array([stream.link.queue_us for stream in self.streams], np.int64)
        rows_E = np.where(can_ask_E, rows_E, 0)
        is_chosen = cpu.choose_copies(
            rows_E, copies_ER, cost_W, call_experts, queue_W, worker_of_expert_E, asked_W2
        )
        assert is_chosen, "experts without a copy are left out"
        return Assignment(worker_of_expert_E, asked_W2), missing

    def _cost_W(self) -> Ints:
        """What an expert costs on each expert worker; see `choose_copies`."""
        now_s = time.monotonic()
        slowness_W = np.array(
            [stream.link.slowness if stream.usable else 0 for stream in self.streams], np.int64
        )
        suspect_W = np.array([stream.is_suspect(now_s) for stream in self.streams], np.bool_)
        penalty_W = np.where(suspect_W, cpu.SUSPECT, self._penalty_W)
        cost_W = np.zeros(len(self.streams), np.int64)
        cpu.set_costs(slowness_W, penalty_W, cost_W)
        return cost_W

    def unavailable(
        self, layer: int, experts: Sequence[int], detail: str = ""
    ) -> ExpertUnavailableError:
        """The error that experts have no usable copy.

        Args:
            layer: Of the experts.
            experts: Which ones.
            detail: What failed before, if anything.
        """
        missing = [(layer, expert) for expert in experts]
        return ExpertUnavailableError(missing, detail=detail or self._why(layer, experts))

    def name(self, worker: int) -> str:
        """An expert worker, for messages."""
        entry = self.streams[worker].worker
        return f"expert worker {entry.worker_id} at {entry.address}"

    def _why(self, layer: int, experts: Sequence[int]) -> str:
        holders = set(self.tables[layer].copies_ER[list(experts)].ravel().tolist()) - {-1}
        if not holders:
            return "no expert worker holds it" if self.streams else "no expert worker is known"
        return "; ".join(self.streams[index].describe() for index in sorted(holders))


def warm_up_choice(config: ModelConfig) -> None:
    """Compiles what choices and times of calls take."""
    nobody = ExpertMap.empty(config)
    if nobody.moe_layers:
        rows_E = np.zeros(nobody.num_experts, np.int64)
        Routes(nobody).choose(nobody.moe_layers[0], rows_E, {}, CallTimes().call_experts)
    CallTimes().see(size_class(1, 1), TYPICAL, 0.0)
    CallTimes().late_after_s(1, TYPICAL)
