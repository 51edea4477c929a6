"""Gives orders to expert workers and waits for their end.

Threads: `placement-order`, one for each order that is carried out; it reads the progress and ends
with the call. A call ends when its expert worker is done or gone, when its controller says that the
expert worker is lost, or at its deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import grpc

from expertmesh.grpc_options import channel_options
from expertmesh.transport import Transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as pb_grpc
from gateway.placement.expert_load import WorkerLife
from gateway.placement.state import ExpertKey, Order

logger = logging.getLogger("gateway.placement")

RETIRE_MS = 1000
"""Between the announcement that an expert goes and its end: gateways learn of it meanwhile."""
_LONGEST_S = 1800.0
_DRAIN_S = 5.0
_MAX_CALLS = 64
_ANSWERS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""Statuses with which an expert worker refuses."""
_MAX_MESSAGE_BYTES = 2**22


@dataclass(frozen=True)
class OrderEnd:
    """How an order ended."""

    order: Order
    is_lost: bool = False
    """Nobody knows what became of it, or will: the connection was lost, or the time was up."""
    failed: tuple[ExpertKey, ...] = ()
    """Experts that could not be loaded or unloaded."""
    message: str = ""
    """What went wrong first; empty if nothing did."""


OnEnd = Callable[[OrderEnd], None]


class _Call(Protocol):
    """The stream of an order."""

    def __iter__(self) -> Iterator[pb.LoadExpertsResponse | pb.UnloadExpertsResponse]:
        """Progress."""

    def cancel(self) -> object:
        """Ends it."""


class Orders(Protocol):
    """Carries orders out."""

    def give(self, order: Order, address: str, token: int) -> None:
        """Begins; its end is told from another thread."""

    def drain(self, address: str, incarnation: int) -> None:
        """Tells an expert worker to end; returns at once."""

    def keep(self, lives: Collection[WorkerLife]) -> None:
        """Gives up the orders of all other expert workers."""

    def stop(self) -> None:
        """Gives up all, and ends."""


class OrderCalls:
    """Orders over LoadExperts and UnloadExperts. Methods may be called from any thread.

    Args:
        transport: Connects to expert workers.
        on_end: Told of the end of each order, in a thread of its own.
    """

    def __init__(self, transport: Transport, on_end: OnEnd) -> None:
        self._transport = transport
        self._on_end = on_end
        self._lock = threading.Lock()
        self._open: dict[Order, _Call | None] = {}
        self._given_up: set[Order] = set()
        self._pool = ThreadPoolExecutor(_MAX_CALLS, "placement-order")

    def give(self, order: Order, address: str, token: int) -> None:
        """See Orders."""
        with self._lock:
            self._open[order] = None
        self._pool.submit(self._carry_out, order, address, token)

    def drain(self, address: str, incarnation: int) -> None:
        """See Orders."""
        self._pool.submit(_drain, self._transport, address, incarnation)

    def keep(self, lives: Collection[WorkerLife]) -> None:
        """See Orders."""
        self._give_up(lambda order: (order.worker_id, order.incarnation) not in lives)

    def stop(self) -> None:
        """See Orders."""
        self._give_up(lambda order: True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _give_up(self, chosen: Callable[[Order], bool]) -> None:
        with self._lock:
            for order, call in self._open.items():
                if chosen(order):
                    self._given_up.add(order)
                    if call is not None:
                        call.cancel()

    def _carry_out(self, order: Order, address: str, token: int) -> None:
        try:
            end = self._read(order, address, token)
        except grpc.RpcError as error:
            end = _failed(order, error)
        with self._lock:
            self._open.pop(order, None)  # an equal one may have been given after it was given up
            self._given_up.discard(order)
        self._on_end(end)

    def _read(self, order: Order, address: str, token: int) -> OrderEnd:
        failed: list[ExpertKey] = []
        message = ""
        with self._transport.channel(address, channel_options(_MAX_MESSAGE_BYTES)) as channel:
            call = _call(pb_grpc.ExpertServiceStub(channel), order, token)
            with self._lock:
                self._open[order] = call
                if order in self._given_up:
                    call.cancel()
            for progress in call:
                if progress.state == pb.EXPERT_STATE_FAILED:
                    failed.append((progress.expert.layer, progress.expert.expert))
                    message = message or progress.message
        return OrderEnd(order, failed=tuple(failed), message=message)


def _failed(order: Order, error: grpc.RpcError) -> OrderEnd:
    """What a failed call says: an answer of the expert worker, or nothing."""
    details = (error.details() if isinstance(error, grpc.Call) else "") or str(error)
    if isinstance(error, grpc.Call) and error.code() in _ANSWERS:
        return OrderEnd(order, failed=order.experts, message=details)
    return OrderEnd(order, is_lost=True, message=details)


def _drain(transport: Transport, address: str, incarnation: int) -> None:
    """Returns once the expert worker has heard of it."""
    try:
        with transport.channel(address, channel_options(_MAX_MESSAGE_BYTES)) as channel:
            request = pb.DrainRequest(incarnation=incarnation)
            next(iter(pb_grpc.ExpertServiceStub(channel).Drain(request, timeout=_DRAIN_S)), None)
    except grpc.RpcError as error:
        logger.warning("the expert worker at %s was not told to drain: %s", address, error)


def _call(stub: pb_grpc.ExpertServiceStub, order: Order, token: int) -> _Call:
    experts = [pb.ExpertId(layer=layer, expert=expert) for layer, expert in order.experts]
    if order.kind == "load":
        load = pb.LoadExpertsRequest(
            incarnation=order.incarnation, leader_token=token, experts=experts
        )
        return stub.LoadExperts(load, timeout=_LONGEST_S)
    unload = pb.UnloadExpertsRequest(
        incarnation=order.incarnation, leader_token=token, experts=experts, retire_ms=RETIRE_MS
    )
    return stub.UnloadExperts(unload, timeout=_LONGEST_S)
