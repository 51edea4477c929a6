"""The device of an expert worker: one computation at a time, whoever asks.

Used by the servicer for rows that come over the network, and by the attention worker's colocated
mode directly. Shape letters: R rows, N pairs (row, expert), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.device_queue import DeviceQueue, Job
from expert_worker.device_turn import Turn
from expert_worker.store import ExpertStore
from expertmesh.errors import ExpertUnavailableError
from expertmesh.wire import RawArray
from expertmesh_kernels.grouped_mlp import ExpertTable, grouped_mlp

MAX_MERGED_ROWS = 4096
"""Rows of calls that are computed together; more would make the first of them wait."""


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
    """Runs resident experts on rows. Safe to call from several threads: a queue owns the device.

    Args:
        store: The experts.
        turn: Of the device, if others use it too.
    """

    def __init__(self, store: ExpertStore, turn: Turn | None = None) -> None:
        self.store = store
        config = store.config
        self._activations = {layer: config.moe_ffn(layer).activation for layer in config.moe_layers}
        self._queue = DeviceQueue(self._compute, MAX_MERGED_ROWS, turn)

    def run(
        self,
        layer: int,
        x_RH: Tensor,
        row_of_pair_N: npt.NDArray[np.int64],
        expert_of_pair_N: npt.NDArray[np.int64],
        *,
        age_s: float = 0.0,
        deadline_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> ExpertOutputs:
        """Computes every pair, together with what waits for the same experts.

        Args:
            layer: An MoE layer.
            x_RH: Rows, in the dtype of the store.
            row_of_pair_N: Row of each pair.
            expert_of_pair_N: Expert of each pair.
            age_s: When its step began, on the monotonic clock; the oldest is computed first.
            deadline_s: Latest time to start on the monotonic clock.
            is_wanted: False once whoever called is gone: it is not computed then.

        Raises:
            ExpertUnavailableError: An expert is not resident.
            TimeoutError: The device was not free before the deadline.
            ConnectionError: Whoever called was gone before it was computed.
        """
        with self.store.lease(layer) as experts:
            _check_resident(layer, expert_of_pair_N, experts)
            job = Job(
                layer, experts, x_RH, row_of_pair_N, expert_of_pair_N, age_s, deadline_s, is_wanted
            )
            self._queue.run(job)
        assert job.outputs_NH is not None
        return ExpertOutputs(job.outputs_NH, job.started_s - job.entered_s, job.compute_s)

    def _compute(self, jobs: Sequence[Job]) -> Sequence[Tensor]:
        """Outputs of calls for the same experts."""
        first = jobs[0]
        if len(jobs) == 1:
            return [self._run_pairs(first, first.x_RH, first.row_of_pair_N, first.expert_of_pair_N)]
        firsts = np.cumsum([0, *(len(job.x_RH) for job in jobs[:-1])])
        ends = np.cumsum([0, *(len(job.row_of_pair_N) for job in jobs)])
        rows_N = [job.row_of_pair_N + at for job, at in zip(jobs, firsts, strict=True)]
        outputs_NH = self._run_pairs(
            first,
            torch.cat([job.x_RH for job in jobs]),
            np.concatenate(rows_N),
            np.concatenate([job.expert_of_pair_N for job in jobs]),
        )
        return [outputs_NH[at:end] for at, end in pairwise(ends)]

    def _run_pairs(
        self,
        like: Job,
        x_RH: Tensor,
        row_of_pair_N: npt.NDArray[np.int64],
        expert_of_pair_N: npt.NDArray[np.int64],
    ) -> Tensor:
        x_device, activation = x_RH.to(self.store.device), self._activations[like.layer]
        y_NH = grouped_mlp(x_device, row_of_pair_N, expert_of_pair_N, like.experts, activation)
        return y_NH.to(x_RH.device)


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
