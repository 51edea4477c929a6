"""Talks to an expert worker over a direct connection, in raw bytes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from expert_worker.compiled_calls import CompiledCalls
from expert_worker.direct_server import DirectServer
from expert_worker.server import ExpertServer
from expertmesh.checksum import SEAL_BYTES, sealed
from expertmesh.direct import connect, read_offer, receive_exactly
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, WireDtype
from expertmesh.wire_encode import (
    LENGTH,
    CallId,
    CallTarget,
    Parts,
    RequestFrame,
    frame_of,
    join_message,
)
from expertmesh_kernels.dispatch import WorkerRows
from tests.support.expert_wire import TIMEOUT_S


@contextmanager
def connection_to(server: ExpertServer) -> Iterator[socket.socket]:
    """A direct connection, as a Forward stream has it beside it."""
    direct = server._direct
    assert isinstance(direct, DirectServer)
    with direct.offer() as metadata:
        port, token = read_offer(metadata[0][1])
        with connect("127.0.0.1", port, token, TIMEOUT_S) as opened:
            opened.settimeout(TIMEOUT_S)
            yield opened


def framed(body: bytes) -> bytes:
    """A message with its seal, behind its length."""
    return b"".join(frame_of(sealed(body)))


def read_reply(opened: socket.socket) -> pb.ForwardResponse:
    """The next reply."""
    return pb.ForwardResponse.FromString(read_frame(opened))


def read_frame(opened: socket.socket) -> bytes:
    """The bytes of the next reply."""
    (length,) = LENGTH.unpack(receive_exactly(opened, LENGTH.size))
    return receive_exactly(opened, length)


def ask(opened: socket.socket, body: bytes) -> pb.ForwardResponse:
    """The reply to a message, which is sealed here."""
    opened.sendall(framed(body))
    return read_reply(opened)


def reply_of_python(server: ExpertServer, message: bytes) -> bytes:
    """What the other way answers, its times left out."""
    received = Received(pb.ForwardRequest.FromString(message), time.monotonic())
    return timeless(pb.ForwardResponse.FromString(join_message(server._servicer.answer(received))))


def timeless(reply: pb.ForwardResponse) -> bytes:
    """A reply without what differs from time to time."""
    for field in ("queue_us", "compute_us", "checksum"):
        reply.ClearField(field)
    return reply.SerializeToString(deterministic=True)


def is_compiled(server: ExpertServer) -> bool:
    """True if its direct connections are answered by compiled code."""
    return isinstance(server._calls, CompiledCalls)


def watch(server: ExpertServer, monkeypatch: pytest.MonkeyPatch) -> list[pb.ForwardRequest]:
    """Calls that Python answers from now on."""
    seen: list[pb.ForwardRequest] = []
    answer = server._servicer.answer

    def watched(received: Received[pb.ForwardRequest]) -> Parts:
        seen.append(received.message or pb.ForwardRequest())
        return answer(received)

    monkeypatch.setattr(server._servicer, "answer", watched)
    return seen


class Caller:
    """Makes calls at random for an expert worker.

    Args:
        server: Whom they are for.
        experts: How many of the first experts they use.
    """

    def __init__(self, server: ExpertServer, experts: int) -> None:
        self._limits = server._servicer.limits
        self._experts = experts
        self._rng = np.random.default_rng(3)

    def message(
        self, num_rows: int, *, layer: int = 1, step: int = 1, dtype: WireDtype | None = None,
        time_left_us: int = 0,
    ) -> bytes:  # fmt: skip
        """A call of so many rows, not sealed."""
        rng, limits = self._rng, self._limits
        used = [self._ids(layer) for _ in range(num_rows)]
        offsets = np.cumsum([0, *map(len, used)]).astype(np.uint32)
        rows = WorkerRows(
            0, np.arange(num_rows), offsets, np.concatenate(used), np.zeros(0, np.int64),
            num_generated_rows=num_rows // 2,
        )  # fmt: skip
        call_id = CallId(rng.integers(2**64, dtype=np.uint64).item(), 3, step, layer, 0, 1)
        target = CallTarget(limits.incarnation, limits.model_fingerprint)
        frame = RequestFrame(
            call_id, target, rows, limits.hidden_size, dtype or limits.dtype,
            time_left_us=time_left_us,
        )  # fmt: skip
        x_RH = rng.standard_normal((num_rows, limits.hidden_size), np.float32)
        frame.rows_RH[:] = as_travels(x_RH, dtype or limits.dtype)
        frame.scales_R[:] = 0.01
        frame.finish()
        return frame.message[:-SEAL_BYTES]

    def _ids(self, layer: int) -> npt.NDArray[np.uint32]:
        most = min(self._experts, self._limits.gates[layer].top_k)
        count = int(self._rng.integers(1, most + 1))
        chosen = self._rng.permutation(self._experts)[:count]
        return np.sort(chosen).astype(np.uint32)


def as_travels(x_RH: npt.NDArray[np.float32], dtype: WireDtype) -> npt.NDArray[np.generic]:
    """Values in the type of a message."""
    if dtype == "bfloat16":
        return (x_RH.view(np.uint32) >> 16).astype(np.uint16)
    types: dict[DtypeName | WireDtype, type[np.generic]] = {
        "float32": np.float32, "float16": np.float16, "int8": np.int8
    }  # fmt: skip
    return x_RH.astype(types[dtype])
