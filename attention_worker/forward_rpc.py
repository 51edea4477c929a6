"""The Forward stream as gRPC has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from expertmesh.grpc_options import channel_options
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_encode import RequestFrame

ForwardRpc: TypeAlias = "grpc.StreamStreamMultiCallable[RequestFrame, pb.ForwardResponse]"

_METHOD = "/expertmesh.v1.ExpertService/Forward"


@contextmanager
def forward_rpc(address: str, max_message_bytes: int) -> Iterator[ForwardRpc]:
    """Opens streams to an expert worker, until the context ends.

    Args:
        address: host:port.
        max_message_bytes: Largest message in either direction.
    """
    with grpc.insecure_channel(address, options=channel_options(max_message_bytes)) as channel:
        yield channel.stream_stream(
            _METHOD,
            request_serializer=_message_of,
            response_deserializer=pb.ForwardResponse.FromString,
        )


def describe_failure(error: grpc.RpcError) -> str:
    """Status and details of a failed RPC, in one line."""
    if not isinstance(error, grpc.Call):
        return str(error) or "the stream failed"
    return f"{error.code().name}: {' '.join((error.details() or '').split())[:200]}"


def _message_of(frame: RequestFrame) -> bytes:
    return frame.message
