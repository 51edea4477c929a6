"""Health for an orchestrator, on a port of its own if one is given.

startup    its experts are loaded and its kernels warm; stays so
readiness  it answers calls: from then on, through a drain, until it refuses them
liveness   this process runs Python; never "busy", so a loaded expert worker is not killed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

STARTUP, READINESS, LIVENESS = "startup", "readiness", "liveness"
"""Names of the services that are asked for."""


class Probes(Protocol):
    """Is told how the expert worker is."""

    port: int
    """Where checks are answered; 0: nowhere."""

    def set_ready(self, ready: bool) -> None:
        """It answers calls, or no longer."""


class NoProbes:
    """Nobody asks."""

    port = 0

    def set_ready(self, ready: bool) -> None:
        """There is nobody to tell."""


@contextmanager
def probes(host: str, port: int | None) -> Iterator[Probes]:
    """A probe server until the end of the context; none without a port.

    Raises:
        PortError: The address cannot be bound.
    """
    if port is None:
        yield NoProbes()
        return
    from expert_worker.probe_server import ProbeServer  # gRPC, which a start has no use for yet

    server = ProbeServer(host, port)
    try:
        yield server
    finally:
        server.stop()
