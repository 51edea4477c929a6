"""Which experts the gates chose, for requests that asked. T rows, K top-k.

MoE layers tell a recorder; the one that is there by default does nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_worker.batch import Batch, Schedule
from attention_worker.request_slots import RequestSlots
from expertmesh.v1 import attention_service_pb2 as pb


class RoutingRecorder(Protocol):
    """Is told the experts of each MoE layer, in the order of layers."""

    def record(self, topk_ids_TK: npt.NDArray[np.int32]) -> None:
        """Takes the experts of all rows in the next MoE layer."""
        ...

    def messages(self, num_computed_S: npt.NDArray[np.int64]) -> list[pb.RoutedExperts]:
        """What was recorded.

        Args:
            num_computed_S: Leading tokens of each scheduled request that count.
        """
        ...


class NoRecorder:
    """For steps whose requests do not ask."""

    def record(self, topk_ids_TK: npt.NDArray[np.int32]) -> None:
        """Nothing is kept."""

    def messages(self, num_computed_S: npt.NDArray[np.int64]) -> list[pb.RoutedExperts]:
        """Nothing was kept."""
        return []


class RoutedExpertsRecorder:
    """Keeps the experts of the rows of those who asked.

    Args:
        schedule: What is computed.
        batch: Its rows.
        asking: Indices of scheduled requests.
    """

    def __init__(self, schedule: Schedule, batch: Batch, asking: list[int]) -> None:
        self._schedule = schedule
        self._asking = asking
        first_S, num_S = schedule.first_rows_S, schedule.num_tokens_S
        rows_T = batch.scheduled_rows_T
        self._rows = [rows_T[first_S[i] : first_S[i] + num_S[i]] for i in asking]
        self._layers: list[list[npt.NDArray[np.uint16]]] = []

    def record(self, topk_ids_TK: npt.NDArray[np.int32]) -> None:
        """Keeps a layer."""
        self._layers.append([topk_ids_TK[rows].astype("<u2") for rows in self._rows])

    def messages(self, num_computed_S: npt.NDArray[np.int64]) -> list[pb.RoutedExperts]:
        """One for each request that asked."""
        return [self._message(at, num_computed_S) for at in range(len(self._asking))]

    def _message(self, at: int, num_computed_S: npt.NDArray[np.int64]) -> pb.RoutedExperts:
        index = self._asking[at]
        num_tokens = int(num_computed_S[index])
        layers = [layer[at][:num_tokens] for layer in self._layers]
        return pb.RoutedExperts(
            slot=int(self._schedule.slots_S[index]),
            start=int(self._schedule.starts_S[index]),
            num_tokens=num_tokens,
            num_layers=len(layers),
            top_k=layers[0].shape[1] if layers else 0,
            expert_ids=np.stack(layers, axis=1).tobytes() if layers else b"",
        )


def routing_recorder(schedule: Schedule, batch: Batch, slots: RequestSlots) -> RoutingRecorder:
    """The recorder of a step."""
    asking = np.flatnonzero(slots.routed_experts_S[schedule.slots_S]).tolist()
    return RoutedExpertsRecorder(schedule, batch, asking) if asking else NoRecorder()
