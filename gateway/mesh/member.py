"""One address that discovery names, as the membership remembers it."""

from __future__ import annotations

from dataclasses import dataclass, field

from expertmesh.placement import ExpertWorkerEntry
from gateway.mesh.discovery import Endpoint
from gateway.mesh.expert_watcher import ExpertWatcher
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus
from gateway.mesh.worker_report import WorkerReport, with_endpoint

START_PATIENCE_S = 3.0
"""An address that does not answer is named in the log after this time, in the status at once."""


@dataclass
class Member:
    """One discovered address."""

    watcher: ExpertWatcher
    endpoint: Endpoint
    """What discovery says of it."""
    heard: WorkerReport
    """What it says of itself."""
    since_s: float
    """When it was discovered, on the monotonic clock."""
    numerics: bytes = b""
    logged: tuple[str, ...] = ()
    """What the log says of it."""
    report: WorkerReport = field(init=False)
    """Both together."""

    def __post_init__(self) -> None:
        """Puts both together."""
        self.hear(self.heard)

    def hear(self, heard: WorkerReport) -> None:
        """It said something, or nothing comes any more."""
        self.heard, self.report = heard, with_endpoint(heard, self.endpoint)

    def find(self, endpoint: Endpoint) -> None:
        """Discovery says something else of the same address."""
        self.endpoint, self.report = endpoint, with_endpoint(self.heard, endpoint)

    @property
    def status(self) -> ExpertWorkerStatus:
        """As its watcher sees it."""
        return self.report.status

    @property
    def entry(self) -> ExpertWorkerEntry | None:
        """Of the expert map, if it can be used."""
        return self.report.entry

    def news(self, now_s: float) -> bool:
        """True if the log should say more; a start is given time before it counts as missing."""
        status = self.status
        facts = (status.state, status.message, status.worker_id)
        starting = not self.logged and status.state is ExpertWorkerState.UNREACHABLE
        if facts == self.logged or (starting and now_s - self.since_s < START_PATIENCE_S):
            return False
        self.logged = facts
        return True
