"""The forward pass of a step, as one micro-batch or as two in turn: the same bits either way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.batch import Batch, Schedule
from attention_worker.layers.ffn import ExpertCalls
from attention_worker.losses import LethalRowsError, LethalStepError
from attention_worker.model import Model
from attention_worker.model_states.model_state import ModelState
from attention_worker.overlap import Splitter, StepTime, halves, run_in_turn
from attention_worker.routed_experts import NoRecorder
from attention_worker.stages import Stages


@dataclass(frozen=True)
class _Part:
    """Some rows of a step, ascending, and how they reach their experts."""

    rows: npt.NDArray[np.int64]
    calls: ExpertCalls


class ForwardPasses:
    """Runs the forward passes of steps. One thread.

    Args:
        model: What is computed.
        stages: Its layers, as they are gone through.
        state: Where rows find what came before them.
        splitter: Decides how many micro-batches a step has.
    """

    def __init__(self, model: Model, stages: Stages, state: ModelState, splitter: Splitter) -> None:
        self._model = model
        self._stages = stages
        self._state = state
        self._splitter = splitter

    def run(self, schedule: Schedule, batch: Batch, calls: ExpertCalls) -> Tensor:
        """What `Model.layer_by_layer` gives for all rows of a step, [T, H].

        Args:
            schedule: The sequences.
            batch: Their rows.
            calls: How MoE layers reach their experts; its counters go on.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy within its deadline.
            LethalStepError: Too many expert workers were lost with the same rows.
        """
        num_rows = len(batch.positions_T)
        parts = self._parts(batch, calls)
        started_s = time.monotonic()
        try:
            results = self._run_parts(schedule, batch, parts)
        except LethalRowsError as error:
            slots = _slots_of(parts[error.micro_batch].rows[error.rows], schedule, batch)
            raise LethalStepError(error, slots) from error
        finally:
            calls.dispatch_s += sum(part.calls.dispatch_s for part in parts)
            calls.wait_s += sum(part.calls.wait_s for part in parts)
        for micro_batch, rows in calls.client.degraded_rows:
            calls.degraded_slots.update(_slots_of(parts[micro_batch].rows[rows], schedule, batch))
        self._splitter.see(
            StepTime(
                num_rows=num_rows,
                own_s=time.monotonic() - started_s - calls.wait_s,
                wait_s=calls.wait_s,
                busy_s=sum(part.calls.busy_s for part in parts),
                is_split=len(parts) > 1,
            )
        )
        return results

    def _parts(self, batch: Batch, calls: ExpertCalls) -> Sequence[_Part]:
        """One part, or two: a recorder wants all rows of a layer at once."""
        num_rows = len(batch.positions_T)
        rows: Sequence[npt.NDArray[np.int64]] = [np.arange(num_rows)]
        if isinstance(calls.recorder, NoRecorder) and self._splitter.should_split(num_rows):
            rows = halves(batch)
        return [_Part(part, _calls_of(part, batch, calls)) for part in rows]

    def _run_parts(self, schedule: Schedule, batch: Batch, parts: Sequence[_Part]) -> Tensor:
        passes = []
        stages = self._stages.pausing if len(parts) > 1 else self._stages.few
        for part in parts:
            inputs = self._state.prepare(
                schedule.slots_S, batch.sequence_of_row_T[part.rows], batch.positions_T[part.rows]
            )
            token_ids_T = batch.token_ids_T[torch.from_numpy(part.rows).to(self._model.device)]
            passes.append(self._model.layer_by_layer(token_ids_T, inputs, part.calls, stages))
        results = run_in_turn(passes)
        if len(results) == 1:
            return results[0]
        joined_TH = results[0].new_empty(len(batch.positions_T), results[0].shape[1])
        for part, result_RH in zip(parts, results, strict=True):
            joined_TH[torch.from_numpy(part.rows).to(joined_TH.device)] = result_RH
        return joined_TH


def _slots_of(rows: npt.NDArray[np.int64], schedule: Schedule, batch: Batch) -> list[int]:
    """Request slots of rows of a step, ascending."""
    slots: list[int] = np.unique(schedule.slots_S[batch.sequence_of_row_T[rows]]).tolist()
    return slots


def _calls_of(rows: npt.NDArray[np.int64], batch: Batch, calls: ExpertCalls) -> ExpertCalls:
    num_generated = int(np.searchsorted(rows, batch.num_generated_rows))
    return replace(calls, num_generated_rows=num_generated, dispatch_s=0.0, wait_s=0.0, busy_s=0.0)
