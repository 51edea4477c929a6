"""The Forward stream as gRPC has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc

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


@contextmanager
def forward_rpc(transport: Transport, address: str, max_message_bytes: int) -> Iterator[ForwardRpc]:
    """Opens streams to an expert worker, until the context ends.

    Args:
        transport: Connects to it.
        address: host:port.
        max_message_bytes: Largest message in either direction.
    """
    with transport.channel(address, channel_options(max_message_bytes)) as channel:
        yield channel.stream_stream(
            _METHOD,
            request_serializer=_message_of,
            response_deserializer=read_reply,
        )


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
