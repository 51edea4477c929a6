"""What is known about the expert workers, as immutable values for the APIs and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ExpertWorkerState(StrEnum):
    """What a gateway thinks of an expert worker."""

    READY = "ready"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class ExpertWorkerStatus:
    """One expert worker, as its watcher sees it."""

    worker_id: str
    """Empty until it was reached once."""
    address: str
    """host:port."""
    state: ExpertWorkerState
    message: str = ""
    """What is wrong; empty if nothing is."""
    num_experts: int = 0
    """Resident (layer, expert) pairs."""


@dataclass(frozen=True)
class MeshStatus:
    """All expert workers, and which experts nobody can be asked for."""

    epoch: int = 0
    """Version of the gateway's expert map."""
    workers: tuple[ExpertWorkerStatus, ...] = ()
    uncovered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer to experts without a usable copy."""
    ready: bool = True
    """Requests can be served."""
    message: str = ""
    """Why not, where the expert workers are not the reason; or at what cost."""
    num_wrong_copies: int = 0
    """Copies of experts with wrong bytes that were found since the gateway started."""
