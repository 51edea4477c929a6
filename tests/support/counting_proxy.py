"""Sits between a gateway and an expert worker, passes every message on, and remembers the calls.

It forwards bytes: what it counts is what was on the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from expertmesh.v1 import expert_service_pb2 as pb

FORWARD = "/expertmesh.v1.ExpertService/Forward"


@dataclass(frozen=True)
class SeenCall:
    """What one ForwardRequest carried."""

    step: int
    layer: int
    micro_batch: int
    attempt: int
    num_rows: int
    experts: tuple[tuple[int, ...], ...]
    """Experts of each row."""
    rows: tuple[bytes, ...]
    """Hidden state of each row."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Step, layer, micro-batch: what must be unique for an expert worker."""
        return self.step, self.layer, self.micro_batch


class CountingProxy:
    """A gRPC server that stands in for the expert worker at `target`."""

    def __init__(self, target: str) -> None:
        self._lock = threading.Lock()
        self._calls: list[SeenCall] = []
        self._channel = grpc.insecure_channel(target)
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="counting-proxy")
        self._server = grpc.server(
            self._pool,
            handlers=[_Handler(self._relay)],
            options=[("grpc.max_receive_message_length", -1)],
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        """host:port to give to the gateway."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait(5)
        self._channel.close()
        self._pool.shutdown()

    def take(self) -> list[SeenCall]:
        """The calls since the last take, in the order of arrival."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def _relay(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        upstream = self._channel.stream_stream(method)(self._noted(method, requests))
        context.add_callback(upstream.cancel)
        try:
            yield from upstream
        except grpc.RpcError as error:
            if context.is_active() and isinstance(error, grpc.Call):
                context.abort(error.code(), error.details() or "")

    def _noted(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        for data in requests:
            if method == FORWARD:
                call = _seen(pb.ForwardRequest.FromString(data))
                with self._lock:
                    self._calls.append(call)
            yield data


class _Handler(grpc.GenericRpcHandler):
    """Takes every method as a stream of bytes both ways, which all kinds of calls are."""

    def __init__(
        self,
        relay: Callable[[str, Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
    ) -> None:
        self._relay = relay

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The handler of one method."""
        method = details.method

        def relay(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._relay(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(relay)


def _seen(message: pb.ForwardRequest) -> SeenCall:
    offsets = np.frombuffer(message.row_offsets, "<u4").tolist()
    experts = np.frombuffer(message.expert_ids, "<u4").tolist()
    num_rows = message.hidden_states.shape[0]
    assert len(offsets) == num_rows + 1
    width = len(message.hidden_states.data) // max(1, num_rows)
    data = message.hidden_states.data
    return SeenCall(
        step=message.id.step,
        layer=message.id.layer,
        micro_batch=message.id.micro_batch,
        attempt=message.id.attempt,
        num_rows=num_rows,
        experts=tuple(tuple(experts[start:end]) for start, end in pairwise(offsets)),
        rows=tuple(data[row * width : (row + 1) * width] for row in range(num_rows)),
    )
