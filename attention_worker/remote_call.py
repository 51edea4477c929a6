"""One dispatch to expert workers, from the plan to the combined rows.

Owner: the model thread. It alone writes the output buffer, so that a reply that comes after a
retry cannot touch it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.calls import Call, Outcome, Unfinished
from attention_worker.expert_routes import Routes
from attention_worker.outcomes import Outcomes, Waiting
from attention_worker.row_writer import row_writer
from expertmesh.errors import ExpertUnavailableError, WireError
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WireDtype
from expertmesh.wire_encode import CallId, CallTarget, RequestFrame
from expertmesh.wire_forward import broken_outputs, view_outputs
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu.exchange_words import FIRST_TRY_SHARE
from expertmesh_kernels.dispatch import (
    Bits,
    Bools,
    WorkerRows,
    as_bits,
    empty_bits,
    plan_dispatch,
    scatter_rows,
)
from expertmesh_kernels.router import Routing

# Answers after which this life of the expert worker is not asked again for a while.
_FINAL_CODES = frozenset(
    {
        pb.ForwardError.CODE_STALE_INCARNATION,
        pb.ForwardError.CODE_WRONG_MODEL,
        pb.ForwardError.CODE_DRAINING,
    }
)


@dataclass(frozen=True)
class Batch:
    """What is dispatched: one micro-batch of one layer."""

    call_id: CallId
    """Identity of the first try."""
    hidden_TH: Tensor
    routing: Routing
    num_generated_rows: int
    dtype: DtypeName
    """Of the hidden states and of the outputs."""
    wire_dtype: WireDtype
    """How hidden states travel."""
    model_fingerprint: int
    deadline_s: float
    """On the monotonic clock."""


@dataclass(frozen=True)
class SentRows:
    """A part of a dispatch that compiled code sent, and that is not answered."""

    rows: WorkerRows
    sent_s: float
    limit_s: float
    """When it counts as failed; both on the monotonic clock."""
    left: Unfinished


@dataclass(frozen=True)
class Progress:
    """What compiled code made of a dispatch before it could not go on."""

    outputs_SH: Bits
    """With what came so far."""
    broken_T: Bools
    """True for rows that are not finite."""
    busy_s: float
    sent: Sequence[SentRows]


class RemoteCall:
    """A dispatch on its way. `start` or `resume` once, then `result` once.

    Args:
        batch: What is sent.
        routes: The expert map of the step.
        waiting: Where the model thread waits.
        unfinished: Has this call in it until it has a result or has failed.
    """

    def __init__(
        self, batch: Batch, routes: Routes, waiting: Waiting, unfinished: set[RemoteCall]
    ) -> None:
        self._unfinished = unfinished
        unfinished.add(self)
        self._batch = batch
        self._routes = routes
        self._layer = batch.call_id.layer
        self._outcomes = Outcomes(waiting)
        self._open: set[Call] = set()
        self._num_attempts = 0
        self.busy_s = 0.0
        """Time that the slowest expert worker computed, as far as replies came."""
        self._tried: dict[int, set[int]] = {}  # expert to the expert workers that failed it
        num_rows, self._hidden_size = batch.hidden_TH.shape
        hidden_TH = batch.hidden_TH.detach().cpu().contiguous()
        self._write_rows = row_writer(hidden_TH, batch.wire_dtype)
        self._broken_T = np.zeros(num_rows, np.bool_)
        self._has_broken_rows = False
        shape = (batch.routing.topk_ids_TK.size, self._hidden_size)
        self._outputs_SH = empty_bits(shape, batch.dtype)
        self._row_bytes = self._hidden_size * self._outputs_SH.itemsize

    def start(self) -> None:
        """Sends one message to each expert worker with rows; does not wait.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy.
        """
        table_E = self._routes.table(self._layer)
        if table_E is None:
            experts = np.flatnonzero(self._batch.routing.counts_E).tolist()
            table_E = self._routes.choose(self._layer, experts, self._tried)
        self._send(table_E)

    def resume(self, progress: Progress) -> None:
        """Goes on with what compiled code began, instead of `start`."""
        self._outputs_SH, self._broken_T = progress.outputs_SH, progress.broken_T
        self._has_broken_rows = bool(progress.broken_T.any())
        self.busy_s = progress.busy_s
        self._num_attempts = 1
        for part in progress.sent:
            call = Call(self._batch.call_id, part.rows, part.limit_s, self._outcomes, part.sent_s)
            self._open.add(call)
            self._routes.streams[part.rows.worker].adopt(call, part.left)
        for part in progress.sent:  # what came already makes no socket ready
            self._routes.streams[part.rows.worker].on_ready()

    def result(self) -> Tensor:
        """[T, H] the weighted sums, in the dtype of the hidden states.

        Raises:
            ExpertUnavailableError: Calls failed, and no other copy answered before the deadline.
        """
        try:
            while self._open:
                self._take(self._next_outcome())
        finally:
            self._unfinished.discard(self)
            for call in self._open:
                self._routes.streams[call.rows.worker].abandon(call)
        hidden_TH = self._batch.hidden_TH
        outputs_SH = torch.from_numpy(self._outputs_SH).view(hidden_TH.dtype).to(hidden_TH.device)
        combined_TH = combine(outputs_SH, self._batch.routing.topk_weights_TK)
        if self._has_broken_rows:
            combined_TH[torch.from_numpy(self._broken_T)] = torch.nan
        return combined_TH

    def drop(self) -> None:
        """Nobody will ask for the result: the step that it belongs to failed elsewhere."""
        self._unfinished.discard(self)
        for call in self._open:
            self._routes.streams[call.rows.worker].forget(call)

    # --- sending ---

    def _send(self, worker_of_expert_E: npt.NDArray[np.int32]) -> None:
        """Sends the pairs of all experts that have a worker (>= 0)."""
        routing, generated = self._batch.routing, self._batch.num_generated_rows
        for rows in plan_dispatch(routing.topk_ids_TK, worker_of_expert_E, generated):
            self._send_rows(rows)
        self._num_attempts += 1

    def _send_rows(self, rows: WorkerRows) -> None:
        stream = self._routes.streams[rows.worker]
        now_s = time.monotonic()
        limit_s = self._limit_s(rows, now_s)
        call_id = self._batch.call_id._replace(attempt=self._num_attempts)
        frame = RequestFrame(
            call_id,
            CallTarget(stream.worker.incarnation, self._batch.model_fingerprint),
            rows,
            self._hidden_size,
            self._batch.wire_dtype,
            time_left_us=max(1, int((limit_s - now_s) * 1e6)),
        )
        # A row that is not finite harms its own request only: zeros travel, and its result is NaN,
        # as it would be with the experts in this process.
        if not self._write_rows(rows.row_ids_R, frame, self._broken_T):
            self._has_broken_rows = True
        frame.finish()
        call = Call(call_id, rows, limit_s, self._outcomes)
        self._open.add(call)
        stream.submit(call, frame)

    def _limit_s(self, rows: WorkerRows, now_s: float) -> float:
        """All the time there is, unless another copy could be asked afterwards."""
        deadline_s = self._batch.deadline_s
        if not self._routes.has_copies:
            return deadline_s
        experts = np.unique(rows.expert_ids_N).tolist()
        if self._routes.has_other_copies(self._layer, experts, rows.worker, self._tried):
            return now_s + (deadline_s - now_s) * FIRST_TRY_SHARE
        return deadline_s

    # --- receiving ---

    def _next_outcome(self) -> Outcome:
        """The next outcome; of the call that is due first, at the latest when it is due."""
        due = min(self._open, key=lambda call: call.limit_s)
        while (left_s := due.limit_s - time.monotonic()) > 0:
            outcome = self._outcomes.get(self._routes.streams, left_s)
            if outcome is not None:
                return outcome
        self._routes.streams[due.rows.worker].abandon(due)
        return Outcome(due, None, "no answer in time")

    def _take(self, outcome: Outcome) -> None:
        call = outcome.call
        if call not in self._open:
            return  # came while it was given up
        self._open.remove(call)
        stream = self._routes.streams[call.rows.worker]
        reason = outcome.reason
        if outcome.response is not None:
            try:
                self._place(call, outcome.response)
            except WireError as error:
                reason = str(error)
                if error.code in _FINAL_CODES:
                    stream.refuse(reason)
            else:
                num_bytes = len(call.rows.expert_ids_N) * self._row_bytes
                self.busy_s = max(self.busy_s, outcome.response.compute_us / 1e6)
                stream.count_answer(call, outcome.response, num_bytes)
                return
        stream.count_fault(reason)
        self._retry(call, reason)

    def _place(self, call: Call, response: pb.ForwardResponse) -> None:
        """Checks the outputs and puts them where they belong. Raises WireError."""
        shape = (len(call.rows.expert_ids_N), self._hidden_size)
        outputs_NH = view_outputs(response, shape, self._batch.dtype)
        expected = self._routes.streams[call.rows.worker].worker.incarnation
        if response.incarnation != expected:
            raise WireError(
                pb.ForwardError.CODE_STALE_INCARNATION,
                f"incarnation of the reply is {response.incarnation:#x}, expected {expected:#x}",
            )
        dtype, slots_N = self._batch.dtype, call.rows.slot_ids_N
        if not scatter_rows(as_bits(outputs_NH, dtype), slots_N, dtype, self._outputs_SH):
            raise broken_outputs()

    def _retry(self, call: Call, reason: str) -> None:
        """Sends the rows of a failed call to other copies of its experts."""
        experts = np.unique(call.rows.expert_ids_N).tolist()
        for expert in experts:
            self._tried.setdefault(expert, set()).add(call.rows.worker)
        detail = f"{self._routes.name(call.rows.worker)}: {reason}"
        if time.monotonic() >= self._batch.deadline_s:
            raise ExpertUnavailableError(pairs(self._layer, experts), detail=detail)
        self._send(self._routes.choose(self._layer, experts, self._tried, detail=detail))


def pairs(layer: int, experts: Iterable[int]) -> list[tuple[int, int]]:
    """(layer, expert) pairs."""
    return [(layer, expert) for expert in experts]
