"""The way to the Forward method of an expert worker, and what a stream of gRPC gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from attention_worker.direct_connection import DirectConnection, open_direct
from expertmesh.grpc_options import channel_options
from expertmesh.transport import Transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, sealed_receiver
from expertmesh.wire_encode import RequestFrame

Reply = Received[pb.ForwardResponse]
ForwardRpc: TypeAlias = "grpc.StreamStreamMultiCallable[RequestFrame, Reply]"

_METHOD = "/expertmesh.v1.ExpertService/Forward"

read_reply = sealed_receiver(pb.ForwardResponse)
"""A reply, however it came."""


@dataclass(frozen=True)
class ForwardEndpoint:
    """Where the method is, and how to get there."""

    transport: Transport
    address: str
    """host:port of the expert worker."""
    max_message_bytes: int
    """Of the largest message in either direction."""

    @contextmanager
    def connected(self) -> Iterator[ForwardRpc]:
        """Opens streams over a connection of its own, until the context ends."""
        options = channel_options(self.max_message_bytes)
        with self.transport.channel(self.address, options) as channel:
            yield channel.stream_stream(
                _METHOD,
                request_serializer=_message_of,
                response_deserializer=read_reply,
            )

    def direct(self, metadata: Sequence[tuple[str, str | bytes]]) -> DirectConnection | None:
        """The direct connection that the metadata of a stream offers, if any.

        Raises:
            OSError: It cannot be had.
        """
        return open_direct(self.address, metadata, self.max_message_bytes)


def describe_failure(error: grpc.RpcError) -> str:
    """Status and details of a failed RPC, in one line."""
    if not isinstance(error, grpc.Call):
        return str(error) or "the stream failed"
    return f"{error.code().name}: {' '.join((error.details() or '').split())[:200]}"


def damage_of(reply: Reply) -> str:
    """What was changed on the way, the reply or its call; nothing if all is well."""
    if not reply.is_intact or reply.message is None:
        return reply.error
    error = reply.message.error
    is_call_damaged = error.code == pb.ForwardError.CODE_DATA_LOSS
    return f"the call came changed: {error.message}" if is_call_damaged else ""


def _message_of(frame: RequestFrame) -> bytes:
    return frame.message
