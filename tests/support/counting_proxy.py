"""Sits between a gateway and an expert worker, passes every message on, and remembers the calls.

It forwards bytes: what it counts is what was on the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from expertmesh.v1 import expert_service_pb2 as pb
from tests.support.grpc_relay import FORWARD, GrpcRelay


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


class CountingProxy(GrpcRelay):
    """A gRPC server that stands in for the expert worker at `target`."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._lock = threading.Lock()
        self._calls: list[SeenCall] = []

    def asked(self, method: str, message: bytes) -> Iterable[bytes]:
        """Remembers a call."""
        if method == FORWARD:
            call = _seen(pb.ForwardRequest.FromString(message))
            with self._lock:
                self._calls.append(call)
        return (message,)

    def take(self) -> list[SeenCall]:
        """The calls since the last take, in the order of arrival."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls


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
