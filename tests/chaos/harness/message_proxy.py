"""A gRPC proxy in front of an expert worker that changes what the worker says and is told."""

from __future__ import annotations

from collections.abc import Iterable

from tests.chaos.harness.network import MessageFault, unchanged
from tests.support.grpc_relay import FORWARD, WATCH, GrpcRelay

__all__ = ["FORWARD", "WATCH", "MessageProxy"]


class MessageProxy(GrpcRelay):
    """Stands in for the expert worker at `target`.

    Args:
        target: host:port of it.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.faults: dict[str, MessageFault] = {}
        """By method, what becomes of its replies."""
        self.request_faults: dict[str, MessageFault] = {}
        """By method, what becomes of its requests."""

    def asked(self, method: str, message: bytes) -> Iterable[bytes]:
        """As its fault has it."""
        return self.request_faults.get(method, unchanged)(message)

    def answered(self, method: str, message: bytes) -> Iterable[bytes]:
        """As its fault has it."""
        return self.faults.get(method, unchanged)(message)
