"""What the engine needs of an attention worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.scheduler_limits import SchedulerLimits


class AttentionPort(Protocol):
    """Steps out, results in, in step order; and the life of the attention worker."""

    def limits(self) -> SchedulerLimits | None:
        """What it has room for; None while it is down. May be called from any thread."""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change`, in any thread, whenever it goes down or comes up."""

    def send(self, step: pb.StepRequest) -> None:
        """Sends a step; does not wait. Raises PeerError if it is down."""

    def receive(self, timeout_s: float) -> pb.StepResponse:
        """The result of the oldest step sent. Raises PeerError if it is lost or the time is up."""

    def restart(self, reason: str) -> None:
        """Ends it and starts a new one, in the background; it is down until that is ready. Has no
        effect while that goes on already."""
