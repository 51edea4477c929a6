"""Talks to an expert worker in raw messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from unittest import mock

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expert_worker import backend
from expert_worker.server import SERVICE, ExpertServer
from expertmesh.checksum import sealed
from expertmesh.grpc_options import channel_options
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import encode_tensor, fingerprint64
from tests.support.tiny_checkpoints import MIXTRAL

TIMEOUT_S = 20.0
HIDDEN = MIXTRAL.hidden_size


@contextmanager
def channel(server: ExpertServer) -> Iterator[grpc.Channel]:
    """A connection, for any size of message."""
    address = f"127.0.0.1:{server.port}"
    with grpc.insecure_channel(address, options=channel_options(2**30)) as opened:
        yield opened


def request(server: ExpertServer, **fields: object) -> pb.ForwardRequest:
    """A valid call with two rows for experts (0, 3) and (1,)."""
    message = pb.ForwardRequest(
        id=pb.CallId(gateway=5, step=1, layer=1, attempt=2),
        incarnation=server.state.identity.incarnation,
        model_fingerprint=fingerprint64(server.state.store.checkpoint.fingerprint),
        hidden_states=encode_tensor(np.ones((2, HIDDEN), np.float32), "float32"),
        row_offsets=np.array([0, 2, 3], np.uint32).tobytes(),
        expert_ids=np.array([0, 3, 1], np.uint32).tobytes(),
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


class RawStream:
    """A Forward stream that seals and sends any bytes, and reads one reply for each."""

    def __init__(self, opened: grpc.Channel, messages: Iterable[bytes]) -> None:
        self._replies = opened.stream_stream(
            f"/{SERVICE}/Forward",
            request_serializer=sealed,
            response_deserializer=pb.ForwardResponse.FromString,
        )(iter(messages), timeout=TIMEOUT_S)

    def read(self) -> list[pb.ForwardResponse]:
        """All replies."""
        return list(self._replies)


def health(opened: grpc.Channel, service: str = "") -> int:
    """Status by grpc.health.v1."""
    message = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(opened).Check(message, timeout=TIMEOUT_S).status)


@contextmanager
def busy_device(server: ExpertServer) -> Iterator[None]:
    """A computation that nobody counts as a call lasts until the end of the context."""
    begun, may_end = Event(), Event()

    def hold(x_RH: torch.Tensor, *args: object) -> torch.Tensor:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        return torch.zeros(1, HIDDEN)

    pair = np.zeros(1, np.int64)
    arguments = (0, torch.ones(1, HIDDEN), pair, pair)
    holder = Thread(target=server.backend.run, args=arguments, name="test-holder")
    with mock.patch.object(backend, "grouped_mlp", hold):
        holder.start()
        assert begun.wait(TIMEOUT_S)
    try:
        yield
    finally:
        may_end.set()
        holder.join(TIMEOUT_S)
