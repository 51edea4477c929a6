"""ExpertService: calls of attention workers, state and orders of gateways.

Threads: each open RPC has one thread of the server's pool. A Forward stream answers one message at
a time in its thread, and its direct connection likewise in one of its own; all meet at the backend.
What a peer sends can end its own RPC at most: a wrong ForwardRequest is answered with a
ForwardError and the stream goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NoReturn, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from torch import Tensor

from expert_worker.backend import ExpertBackend, raw_array
from expert_worker.device_queue import StepAges
from expert_worker.direct_server import DirectOffers
from expert_worker.maintenance import Event, Maintenance
from expert_worker.row_reader import read_rows
from expert_worker.state import WorkerState, elapsed_us, remaining, time_left_deadline
from expertmesh.checksum import sealed
from expertmesh.errors import ExpertUnavailableError, WireError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, WireDtype, invalid, wire_dtypes
from expertmesh.wire_encode import (
    CallId,
    CallTarget,
    Parts,
    ReplyHead,
    RequestFrame,
    encode_reply,
    frame_of,
)
from expertmesh.wire_forward import ForwardCall, ForwardLimits, view_forward_request
from expertmesh_kernels.dispatch import CallRows, WorkerRows

logger = logging.getLogger(__name__)

_HEARTBEAT_MS = 1000
_HEARTBEAT_LIMITS_MS = (50, 60_000)
_SNAPSHOT_PAUSE_S = 0.02  # so that many changes, as experts are loaded, take little time
_MAX_DRAIN_MS = 600_000
_DRAIN_REPORT_S = 0.2
_STATUS_OF_CODE = {
    pb.ForwardError.CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ForwardError.CODE_STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ForwardError.CODE_RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ForwardError.CODE_DRAINING: grpc.StatusCode.FAILED_PRECONDITION,
}


class ExpertServicer:
    """Implements ExpertService; requests come as `Received`, parsed or not.

    Args:
        state: The expert worker.
        backend: Its device.
        maintenance: Loads and unloads.
        max_streams: Forward streams at a time, and as many Watch streams.
        direct: Offers direct connections.
        order_drain: Begins a drain that may take so many seconds, None for the usual time, at the
            end of which the process ends.
    """

    limits: ForwardLimits
    """What calls must fit."""
    ages: StepAges
    """Of the steps that calls belong to."""

    def __init__(
        self,
        state: WorkerState,
        backend: ExpertBackend,
        maintenance: Maintenance,
        max_streams: int,
        direct: DirectOffers,
        order_drain: Callable[[float | None], None],
    ) -> None:
        self._state = state
        self._backend = backend
        self._maintenance = maintenance
        self._max_streams = max_streams
        self._direct = direct
        self.ages = StepAges()
        self._order_drain = order_drain
        self.limits = ForwardLimits.of(
            state.store.config,
            state.store.dtype,
            incarnation=state.identity.incarnation,
            model_fingerprint=state.store.checkpoint.fingerprint,
            max_rows=state.identity.row_credits,
        )

    # --- Forward ---

    def forward(
        self, requests: Iterator[Received[pb.ForwardRequest]], context: grpc.ServicerContext
    ) -> Iterator[Parts]:
        """Answers every message of a stream, in order."""
        if not self._state.open_stream(self._max_streams):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_streams} streams are open already"
            )
        try:
            with self._direct.offer() as metadata:
                context.send_initial_metadata(metadata)  # tells the client that the stream is up
                for received in requests:
                    yield self.answer(replace(received, is_wanted=context.is_active))
        finally:
            self._state.close_stream()

    def answer(self, received: Received[pb.ForwardRequest]) -> Parts:
        """A framed ForwardResponse: outputs or an error, with the id echoed. Never raises."""
        try:
            return self._answer(received)
        except WireError as error:
            return self._refuse(received, error)
        except Exception as error:
            call = pb.CallId() if received.message is None else received.message.id
            logger.exception("a call of step %d, layer %d failed", call.step, call.layer)
            reason = f"{type(error).__name__}: {error}"
            return self._refuse(received, WireError(pb.ForwardError.CODE_INTERNAL, reason))

    def warm_up(self, layer: int, expert: int) -> None:
        """Computes a row of zeros as if it came over the network; counts nothing."""
        limits = self.limits
        for dtype in wire_dtypes(limits.dtype):
            message = pb.ForwardRequest.FromString(zeros_message(layer, expert, dtype, limits))
            x_RH, rows = read_rows(view_forward_request(message, limits), limits)
            self._backend.run(layer, x_RH, rows.row_of_pair_N, rows.expert_of_pair_N)

    def _answer(self, received: Received[pb.ForwardRequest]) -> Parts:
        message = received.message
        if not received.is_intact:
            raise WireError(pb.ForwardError.CODE_DATA_LOSS, received.error)
        if message is None:
            raise invalid(received.error)
        call = view_forward_request(message, self.limits)
        x_RH, rows = read_rows(call, self.limits)
        self._state.begin_call()
        try:
            return self._compute(call, x_RH, rows, received, message.id)
        finally:
            self._state.end_call()

    def _compute(
        self,
        call: ForwardCall,
        x_RH: Tensor,
        rows: CallRows,
        received: Received[pb.ForwardRequest],
        call_id: pb.CallId,
    ) -> Parts:
        received_s = received.received_s
        try:
            result = self._backend.run(
                call.layer,
                x_RH,
                rows.row_of_pair_N,
                rows.expert_of_pair_N,
                age_s=self.ages.age_s(call_id.gateway, call_id.step, received_s),
                deadline_s=time_left_deadline(received_s, call.time_left_us),
                is_wanted=received.is_wanted,
            )
        except ExpertUnavailableError as error:
            ids = [expert for _, expert in error.missing]
            code = pb.ForwardError.CODE_EXPERT_NOT_RESIDENT
            raise WireError(code, str(error), expert_ids=ids) from error
        except TimeoutError as error:
            raise WireError(
                pb.ForwardError.CODE_DEADLINE_EXCEEDED,
                f"time_left_us is {call.time_left_us}, used up before the computation started",
            ) from error
        except ConnectionError as error:
            raise WireError(pb.ForwardError.CODE_DEADLINE_EXCEEDED, str(error)) from error
        compute_us = elapsed_us(result.compute_s)
        head = ReplyHead(
            call_id.SerializeToString(),
            self._state.identity.incarnation,
            elapsed_us(time.monotonic() - received_s - result.compute_s),
            compute_us,
            self._state.identity.row_credits,
        )
        outputs_NH = raw_array(result.outputs_NH)
        parts = encode_reply(head, outputs_NH, self.limits.dtype)
        self._state.count_answer(
            call.layer, call.num_rows, rows.expert_of_pair_N, compute_us, result.queue_s
        )
        return parts

    def _refuse(self, received: Received[pb.ForwardRequest], error: WireError) -> Parts:
        self._state.count_error()
        response = pb.ForwardResponse(
            incarnation=self._state.identity.incarnation,
            row_credits=self._state.identity.row_credits,
        )
        if received.message is not None and received.message.HasField("id"):
            response.id.CopyFrom(received.message.id)
        response.error.code = error.code
        response.error.message = str(error)
        response.error.expert_ids.extend(error.expert_ids)
        return frame_of(sealed(response.SerializeToString()))

    # --- Watch ---

    def watch(
        self, received: Received[pb.WatchRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        """A snapshot at once, after changes, and as a heartbeat."""
        request = _parsed(received, context)
        hands_over = request.hands_over
        if not self._state.open_watch(self._max_streams, hands_over=hands_over):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_streams} watches are open already"
            )
        low, high = _HEARTBEAT_LIMITS_MS
        heartbeat_ms = min(max(request.heartbeat_ms or _HEARTBEAT_MS, low), high)
        context.add_callback(self._state.wake)
        try:
            yield from self._snapshots(heartbeat_ms / 1000, context)
        finally:
            self._state.close_watch(hands_over=hands_over)

    def _snapshots(
        self, heartbeat_s: float, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        version, told_s = -1, 0.0
        while context.is_active():
            # The version comes first: a change during the snapshot causes another one.
            version = self._state.wait_change(version, heartbeat_s, context.is_active)
            self._state.wait_stop(remaining(told_s + _SNAPSHOT_PAUSE_S))
            told_s = time.monotonic()
            is_last = self._state.stopping
            yield self._state.snapshot()
            if is_last:
                return

    # --- orders ---

    def load_experts(
        self, received: Received[pb.LoadExpertsRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.LoadExpertsResponse]:
        """Loads in the background; progress."""
        request = _parsed(received, context)
        try:
            self._maintenance.authorise(request.incarnation, request.leader_token)
            events = self._maintenance.load(_ids(request.experts))
        except WireError as error:
            _abort(context, error)
        for event in events:
            yield pb.LoadExpertsResponse(expert=_expert_id(event), state=event[2], message=event[3])

    def unload_experts(
        self, received: Received[pb.UnloadExpertsRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.UnloadExpertsResponse]:
        """Retires, waits, frees in the background; progress."""
        request = _parsed(received, context)
        try:
            self._maintenance.authorise(request.incarnation, request.leader_token)
            events = self._maintenance.unload(_ids(request.experts), request.retire_ms)
        except WireError as error:
            _abort(context, error)
        for event in events:
            yield pb.UnloadExpertsResponse(
                expert=_expert_id(event), state=event[2], message=event[3]
            )

    def drain(
        self, received: Received[pb.DrainRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.DrainResponse]:
        """Begins to drain; progress until the process ends, or the client leaves."""
        request = _parsed(received, context)
        timeout_ms = request.timeout_ms
        try:
            self._maintenance.authorise_incarnation(request.incarnation)
            if timeout_ms > _MAX_DRAIN_MS:
                raise invalid(f"timeout_ms is {timeout_ms}, expected at most {_MAX_DRAIN_MS}")
        except WireError as error:
            _abort(context, error)
        self._order_drain(timeout_ms / 1000 if timeout_ms else None)
        while not self._state.wait_stop(_DRAIN_REPORT_S) and context.is_active():
            yield self._drain_response()
        last = self._drain_response()
        last.drained = self._state.stopping and not last.calls_in_flight
        yield last

    def _drain_response(self) -> pb.DrainResponse:
        return pb.DrainResponse(
            calls_in_flight=self._state.calls_in_flight,
            experts_left=self._state.store.num_used_slots,
        )


def zeros_message(layer: int, expert: int, dtype: WireDtype, limits: ForwardLimits) -> bytes:
    """A call with one row of zeros for one expert."""
    frame = RequestFrame(
        CallId(gateway=0, epoch=0, step=0, layer=layer, micro_batch=0),
        CallTarget(limits.incarnation, limits.model_fingerprint),
        WorkerRows(
            worker=0,
            row_ids_R=np.zeros(1, np.int64),
            row_offsets=np.array([0, 1], np.uint32),
            expert_ids_N=np.full(1, expert, np.uint32),
            slot_ids_N=np.zeros(1, np.int64),
            num_generated_rows=0,
        ),
        limits.hidden_size,
        dtype,
    )
    frame.rows_RH[:] = 0
    frame.scales_R[:] = 0
    frame.finish()
    return frame.message


T = TypeVar("T", bound=Message)


def _parsed(received: Received[T], context: grpc.ServicerContext) -> T:
    """The message; ends the RPC if there is none."""
    if received.message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, received.error)
    return received.message


def _abort(context: grpc.ServicerContext, error: WireError) -> NoReturn:
    context.abort(_STATUS_OF_CODE[error.code], str(error))


def _ids(experts: Iterable[pb.ExpertId]) -> list[tuple[int, int]]:
    return [(entry.layer, entry.expert) for entry in experts]


def _expert_id(event: Event) -> pb.ExpertId:
    return pb.ExpertId(layer=event[0], expert=event[1])
