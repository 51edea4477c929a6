"""The device of an expert worker: one call computes at a time, whoever asks.

Used by the servicer for rows that come over the network, and by the attention worker's colocated
mode directly. Shape letters: R rows, N pairs (row, expert), H hidden size.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.store import ExpertStore
from expertmesh.errors import ExpertUnavailableError
from expertmesh.wire import RawArray
from expertmesh_kernels.grouped_mlp import ExpertTable, grouped_mlp

_LONGEST_WAIT_S = 120.0  # of a call without a deadline, for the device


@dataclass(frozen=True)
class ExpertOutputs:
    """What one call computed."""

    outputs_NH: Tensor
    """One unweighted row per pair, in the order of the pairs, in the dtype of the input."""
    queue_s: float
    """Waited for the device, in seconds."""
    compute_s: float
    """Computed, in seconds."""


class ExpertBackend:
    """Runs resident experts on rows. Safe to call from several threads: a lock owns the device."""

    def __init__(self, store: ExpertStore) -> None:
        self.store = store
        self._device_lock = threading.Lock()

    def run(
        self,
        layer: int,
        x_RH: Tensor,
        row_of_pair_N: npt.NDArray[np.int64],
        expert_of_pair_N: npt.NDArray[np.int64],
        *,
        deadline_s: float | None = None,
    ) -> ExpertOutputs:
        """Computes every pair.

        Args:
            layer: An MoE layer.
            x_RH: Rows, in the dtype of the store.
            row_of_pair_N: Row of each pair.
            expert_of_pair_N: Expert of each pair.
            deadline_s: Latest time to start on the monotonic clock.

        Raises:
            ExpertUnavailableError: An expert is not resident.
            TimeoutError: The device was not free before the deadline.
        """
        entered_s = time.monotonic()
        wait_s = _LONGEST_WAIT_S if deadline_s is None else deadline_s - entered_s
        with self.store.lease(layer) as experts:
            _check_resident(layer, expert_of_pair_N, experts)
            if wait_s <= 0 or not self._device_lock.acquire(timeout=wait_s):
                raise TimeoutError(f"the device was not free within {max(wait_s, 0):.3f} s")
            try:
                started_s = time.monotonic()
                activation = self.store.config.moe_ffn(layer).activation
                x_device = x_RH.to(self.store.device)
                y_NH = grouped_mlp(x_device, row_of_pair_N, expert_of_pair_N, experts, activation)
                y_NH = y_NH.to(x_RH.device)
                ended_s = time.monotonic()
            finally:
                self._device_lock.release()
        return ExpertOutputs(y_NH, started_s - entered_s, ended_s - started_s)


def _check_resident(
    layer: int, expert_of_pair_N: npt.NDArray[np.int64], experts: ExpertTable
) -> None:
    if missing := experts.missing(expert_of_pair_N):
        pairs = [(layer, expert) for expert in missing]
        raise ExpertUnavailableError(pairs, detail="not resident here")


def raw_array(tensor: Tensor) -> RawArray:
    """The memory of a contiguous CPU tensor as it travels: bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        bits: RawArray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: RawArray = tensor.numpy()
    return array
