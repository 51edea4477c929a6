"""One dispatch to expert workers, from the plan to the combined rows.

A call that fails is *retried*: other copies of its experts are asked. One that is late is *hedged*:
they are asked too, and whose reply comes first is taken. Either way it has *parts* then, calls that
carry its rows again, and its rows are there when its own reply is or those of all parts are.

Owner: the model thread. It alone writes the output buffer, so that a reply that comes after a
retry cannot touch it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.call_times import CallTimes, HedgeBudget, size_class
from attention_worker.calls import MOST_TRIES, Batch, Call, Outcome, Progress
from attention_worker.dropped_experts import DroppedExperts, without
from attention_worker.expert_routes import Assignment, Routes, Tried
from attention_worker.losses import MOST_LOSSES, Losses
from attention_worker.outcomes import Outcomes, Waiting
from attention_worker.row_writer import row_writer
from attention_worker.trust import FINAL_CODES, HONEST_CODES
from expertmesh.errors import WireError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import all_finite
from expertmesh.wire_encode import CallTarget, RequestFrame
from expertmesh.wire_forward import broken_outputs, view_outputs
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu.exchange_words import FIRST_TRY_SHARE
from expertmesh_kernels.dispatch import (
    WorkerRows,
    as_bits,
    empty_bits,
    plan_dispatch,
    scatter_rows,
)

logger = logging.getLogger(__name__)

_LATE = "no answer in time"
_SAME_MOMENT_S = 0.025  # in which all die that compute the same row, and are seen to have died


@dataclass(frozen=True)
class Common:
    """What all dispatches of a client share."""

    times: CallTimes = field(default_factory=CallTimes)
    budget: HedgeBudget = field(default_factory=HedgeBudget)
    waiting: Waiting = field(default_factory=Waiting)
    """Where the model thread waits."""
    unfinished: set[RemoteCall] = field(default_factory=set)
    """Dispatches that have no result yet, and have not failed."""
    dropped: DroppedExperts = field(default_factory=DroppedExperts)


class RemoteCall:
    """A dispatch on its way. `start` or `resume` once, then `result` once.

    Args:
        batch: What is sent.
        routes: The expert map of the step.
        common: Of the client.
    """

    def __init__(self, batch: Batch, routes: Routes, common: Common) -> None:
        self._common = common
        common.unfinished.add(self)
        self._batch = batch
        self._routes = routes
        self._layer = batch.call_id.layer
        self._outcomes = Outcomes(common.waiting)
        self._open: set[Call] = set()
        self._parts: dict[Call, set[Call]] = {}  # what is missing of calls that others carry again
        self._num_attempts = 0
        self.busy_s = 0.0
        """Time that the slowest expert worker computed, as far as replies came."""
        self._tried: dict[int, set[int]] = {}  # expert to the expert workers that failed it
        self._losses = Losses(1 if batch.cautious else MOST_LOSSES)
        self._dropped: set[int] = set()  # experts that the result goes without
        num_rows, self._hidden_size = batch.hidden_TH.shape
        hidden_TH = batch.hidden_TH.detach().cpu().contiguous()
        self._write_rows = row_writer(hidden_TH, batch.wire_dtype)
        self._broken_T = np.zeros(num_rows, np.bool_)
        self._has_broken_rows = False
        shape = (batch.routing.topk_ids_TK.size, self._hidden_size)
        self._outputs_SH = empty_bits(shape, batch.dtype)
        self._row_bytes = self._hidden_size * self._outputs_SH.itemsize

    def start(self) -> None:
        """Sends one message to each expert worker with rows; does not wait, unless it is cautious.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy.
            LethalRowsError: An expert worker was lost with rows that are suspected of that.
        """
        rows_E = self._batch.routing.counts_E
        assignment, missing = self._choose(rows_E, self._tried)
        if missing and not self._drop(missing, rows_E):
            raise self._routes.unavailable(self._layer, missing)
        if self._batch.cautious:
            self._send_in_turn(assignment)
        else:
            self._send(assignment)

    def resume(self, progress: Progress) -> None:
        """Goes on with what compiled code began, instead of `start`."""
        self._outputs_SH, self._broken_T = progress.outputs_SH, progress.broken_T
        self._has_broken_rows = bool(progress.broken_T.any())
        self.busy_s = progress.busy_s
        self._num_attempts = 1
        for part in progress.sent:
            call = Call(
                self._batch.call_id,
                part.rows,
                part.limit_s,
                self._outcomes,
                part.sent_s,
                part.size_class,
            )
            self._open.add(call)
            self._routes.streams[part.rows.worker].adopt(call, part.left)
        for part in progress.sent:  # what came already makes no socket ready
            self._routes.streams[part.rows.worker].on_ready()

    def result(self) -> Tensor:
        """[T, H] the weighted sums, in the dtype of the hidden states.

        Raises:
            ExpertUnavailableError: Calls failed, and no other copy answered before the deadline.
            LethalRowsError: Too many expert workers were lost with the same rows.
        """
        try:
            self._wait()
        finally:
            self.drop()
        hidden_TH, routing = self._batch.hidden_TH, self._batch.routing
        weights_TK = routing.topk_weights_TK
        if self._dropped:
            is_out_TK, weights_TK = without(routing.topk_ids_TK, weights_TK, self._dropped)
            self._outputs_SH[is_out_TK.ravel()] = 0
            self._common.dropped.note(self._batch.call_id.micro_batch, is_out_TK)
        outputs_SH = torch.from_numpy(self._outputs_SH).view(hidden_TH.dtype).to(hidden_TH.device)
        combined_TH = combine(outputs_SH, weights_TK)
        if self._has_broken_rows:
            combined_TH[torch.from_numpy(self._broken_T)] = torch.nan
        return combined_TH

    def drop(self) -> None:
        """Nobody will ask for the result: the step that it belongs to failed elsewhere."""
        self._common.unfinished.discard(self)
        for call in self._open:
            self._routes.streams[call.rows.worker].forget(call)

    # --- sending ---

    def _send(self, assignment: Assignment, instead_of: Call | None = None) -> list[Call]:
        """Sends the pairs of all experts that have an expert worker; the calls."""
        routing, generated = self._batch.routing, self._batch.num_generated_rows
        plan = plan_dispatch(routing.topk_ids_TK, assignment.worker_of_expert_E, generated)
        calls = [self._send_rows(rows, assignment, instead_of) for rows in plan]
        self._num_attempts += 1
        return calls

    def _send_in_turn(self, assignment: Assignment) -> None:
        """The same to one expert worker after the other: no two have the same rows at a time."""
        routing, generated = self._batch.routing, self._batch.num_generated_rows
        for rows in plan_dispatch(routing.topk_ids_TK, assignment.worker_of_expert_E, generated):
            self._send_rows(rows, assignment, None)
            self._num_attempts += 1
            self._wait()

    def _send_rows(self, rows: WorkerRows, assignment: Assignment, instead_of: Call | None) -> Call:
        stream = self._routes.streams[rows.worker]
        now_s = time.monotonic()
        call_id = self._batch.call_id._replace(attempt=self._num_attempts)
        frame = RequestFrame(
            call_id,
            CallTarget(stream.worker.incarnation, self._batch.model_fingerprint),
            rows,
            self._hidden_size,
            self._batch.wire_dtype,
            time_left_us=max(1, int((self._batch.deadline_s - now_s) * 1e6)),
        )
        # A row that is not finite harms its own request only: zeros travel, and its result is NaN,
        # as it would be with the experts in this process.
        if not self._write_rows(rows.row_ids_R, frame, self._broken_T):
            self._has_broken_rows = True
        frame.finish()
        call = Call(call_id, rows, self._batch.deadline_s, self._outcomes, instead_of=instead_of)
        if assignment.may_move(rows.worker):
            num_experts = assignment.num_experts(rows.worker)
            call.size_class = size_class(len(rows.expert_ids_N), num_experts)
            call.limit_s = now_s + self._late_after_s(call, now_s)
        self._open.add(call)
        stream.submit(call, frame)
        return call

    def _late_after_s(self, call: Call, now_s: float) -> float:
        """Not all the time there is, as others can be asked."""
        left_s = self._batch.deadline_s - now_s
        slowness = self._routes.streams[call.rows.worker].link.slowness
        late_s = self._common.times.late_after_s(call.size_class, slowness)
        return left_s * FIRST_TRY_SHARE if late_s is None else min(late_s, left_s)

    # --- receiving ---

    def _wait(self) -> None:
        while self._open:
            self._next()

    def _next(self) -> None:
        """Takes the next outcome; or that a call is late, when the first one is."""
        due = min(self._open, key=lambda call: call.limit_s)
        while True:
            # Without time left it is a look at what has come: perhaps it was us who did not run.
            left_s = due.limit_s - time.monotonic()
            outcome = self._outcomes.get(self._routes.streams, max(0.0, left_s))
            if outcome is not None:
                return self._take(outcome)
            if left_s <= 0:
                return self._be_late(due)

    def _take(self, outcome: Outcome) -> None:
        call = outcome.call
        if call not in self._open:
            return  # came while it was given up
        self._open.remove(call)
        stream = self._routes.streams[call.rows.worker]
        reason, call.cause = outcome.reason, outcome.cause
        if outcome.response is not None:
            try:
                self._place(call, outcome.response)
            except WireError as error:
                reason = str(error)
                if error.code in FINAL_CODES:
                    stream.refuse(reason)
                elif error.code not in HONEST_CODES:
                    stream.be_wrong(reason)
            else:
                num_pairs, compute_us = len(call.rows.expert_ids_N), outcome.response.compute_us
                self.busy_s = max(self.busy_s, compute_us / 1e6)
                num_bytes = num_pairs * self._row_bytes
                stream.observed.count_answer(num_pairs, num_bytes, compute_us)
                return self._settle(call)
        stream.observed.count_fault(reason)
        if outcome.is_lost:
            self._losses.add(call, f"{self._routes.name(call.rows.worker)}: {reason}")
            self._look_around()
        if not call.is_served:
            self._retry(call, reason)

    def _look_around(self) -> None:
        """Others that have the same rows may be lost at the same moment: then no more are asked."""
        until_s = time.monotonic() + _SAME_MOMENT_S
        while self._open and (left_s := until_s - time.monotonic()) > 0:
            outcome = self._outcomes.get(self._routes.streams, left_s)
            if outcome is not None:
                self._take(outcome)

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
        # Others may have filled some of these slots already, and nobody would fill them again.
        if call in self._parts and not all_finite(outputs_NH, dtype):
            raise broken_outputs()
        if not scatter_rows(as_bits(outputs_NH, dtype), slots_N, dtype, self._outputs_SH):
            raise broken_outputs()

    def _settle(self, call: Call) -> None:
        """The rows of a call are there."""
        call.is_served = True
        for part in self._parts.pop(call, ()):
            self._let_go(part)
        whole = call.instead_of
        if whole is None or whole not in self._parts:
            return
        self._parts[whole].discard(call)
        if not self._parts[whole]:
            if whole in self._open:
                self._open.remove(whole)
                self._routes.streams[whole.rows.worker].abandon(whole)
            self._settle(whole)

    def _let_go(self, call: Call) -> None:
        """The rows of a call came otherwise."""
        call.is_served = True
        if call in self._open:
            self._open.remove(call)
            self._routes.streams[call.rows.worker].forget(call)
        for part in self._parts.pop(call, ()):
            self._let_go(part)

    # --- asking others ---

    def _be_late(self, call: Call) -> None:
        """Hedges a call; at the end of the dispatch it fails."""
        stream, now_s = self._routes.streams[call.rows.worker], time.monotonic()
        stream.observed.count_late(call)
        if now_s >= self._batch.deadline_s:
            self._open.remove(call)
            stream.abandon(call)
            stream.observed.count_fault(_LATE)
            return self._retry(call, _LATE)
        if stream.be_late():
            logger.warning(
                "step %d, layer %d: %s is late with %d rows for experts %s",
                call.call_id.step,
                self._layer,
                self._routes.name(call.rows.worker),
                call.num_rows,
                np.unique(call.rows.expert_ids_N).tolist(),
            )
        if not (call.is_overdue or self._common.budget.take(self._num_answered())):
            call.is_overdue = True
            call.limit_s = now_s + (self._batch.deadline_s - now_s) * FIRST_TRY_SHARE
            return None
        call.limit_s = self._batch.deadline_s
        stream.observed.count_fault(_LATE)
        if self._ask_others(call) is None:
            stream.observed.count_hedge()
        return None

    def _num_answered(self) -> int:
        return sum(stream.observed.num_answers for stream in self._routes.streams)

    def _retry(self, call: Call, reason: str) -> None:
        """Sends the rows of a failed call to other copies, unless they are on their way there."""
        if self._may_come(call):
            return
        experts: Sequence[int] | None = np.unique(call.rows.expert_ids_N).tolist()
        in_time = time.monotonic() < self._batch.deadline_s
        if in_time:
            experts = self._ask_others(call)
        if experts is None:
            self._routes.streams[call.rows.worker].observed.count_retry(call.cause)
        elif not self._is_part_of_open(call):
            if in_time and self._drop(experts, self._rows_E(call)):
                return self._retry(call, reason)
            detail = f"{self._routes.name(call.rows.worker)}: {reason}"
            raise self._routes.unavailable(self._layer, experts, detail)
        return None

    def _ask_others(self, call: Call) -> Sequence[int] | None:
        """Sends the rows of a call to other copies; nothing, if experts have none: those."""
        rows_E = self._rows_E(call)
        for expert in np.flatnonzero(rows_E).tolist():
            self._tried.setdefault(expert, set()).add(call.rows.worker)
        assignment, missing = self._choose(rows_E, self._tried)
        if missing and call.cause == "damaged" and self._num_attempts < MOST_TRIES:
            others = {e: workers - {call.rows.worker} for e, workers in self._tried.items()}
            assignment, missing = self._choose(rows_E, others)
        if missing:
            return missing
        for part in self._parts.pop(call, ()):
            self._let_go(part)
        self._parts[call] = set(self._send(assignment, call))
        if not self._parts[call]:
            self._settle(call)
        return None

    def _choose(self, rows_E: npt.NDArray[np.int64], tried: Tried) -> tuple[Assignment, list[int]]:
        times = self._common.times
        return self._routes.choose(self._layer, rows_E, tried, times.call_experts)

    def _rows_E(self, call: Call) -> npt.NDArray[np.int64]:
        """Rows of each expert in a call, but for those that were dropped."""
        rows_E = np.bincount(call.rows.expert_ids_N, minlength=len(self._batch.routing.counts_E))
        rows_E[list(self._dropped)] = 0
        return rows_E

    def _drop(self, experts: Sequence[int], rows_E: npt.NDArray[np.int64]) -> bool:
        """Goes on without these experts, if that is allowed; suspects are not to get by so."""
        if self._batch.cautious or not self._common.dropped.allowed:
            return False
        self._dropped.update(experts)
        self._common.dropped.drop(self._layer, experts, int(rows_E[experts].sum()))
        return True

    def _may_come(self, call: Call) -> bool:
        """True if the rows of a call may still come, from itself or from its parts."""
        parts = self._parts.get(call)
        return call in self._open or (parts is not None and all(map(self._may_come, parts)))

    def _is_part_of_open(self, call: Call) -> bool:
        """True if somebody was asked for these rows before and may still answer."""
        whole = call.instead_of
        return whole is not None and (whole in self._open or self._is_part_of_open(whole))
