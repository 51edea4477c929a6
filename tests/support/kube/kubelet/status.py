"""What a kubelet of the tests reports of a pod."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.kube.resources import Json
from tests.support.kube.store import now


@dataclass
class ContainerState:
    """Of one container."""

    name: str
    image: str
    is_running: bool = False
    has_started: bool = False
    is_ready: bool = False
    exit_code: int | None = None
    num_restarts: int = 0
    since: str = field(default_factory=now)

    def report(self) -> Json:
        """As the status of a pod has it."""
        state: Json = {"waiting": {"reason": "ContainerCreating"}}
        if self.is_running:
            state = {"running": {"startedAt": self.since}}
        elif self.exit_code is not None:
            state = {"terminated": {"exitCode": self.exit_code, "finishedAt": self.since}}
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "ready": self.is_ready,
            "started": self.has_started,
            "restartCount": self.num_restarts,
            "state": state,
        }


class PodState:
    """Of all containers of one pod.

    Args:
        manifest: Of the pod.
        address: Of the pod.

    Attributes:
        is_initialized: Volumes are there, and all init containers have ended well.
    """

    def __init__(self, manifest: Json, address: str) -> None:
        self._address = address
        self.is_initialized = False
        self.containers = [
            ContainerState(each["name"], each.get("image", ""))
            for each in manifest["spec"]["containers"]
        ]
        self._was_ready, self._since = False, now()

    def report(self) -> Json:
        """As the status of a pod has it."""
        is_ready = self.is_initialized and all(state.is_ready for state in self.containers)
        if is_ready != self._was_ready:
            self._was_ready, self._since = is_ready, now()
        conditions = {
            "PodScheduled": True,
            "Initialized": self.is_initialized,
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        has_run = any(state.is_running or state.exit_code is not None for state in self.containers)
        return {
            "phase": "Running" if has_run else "Pending",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "hostIP": "127.0.0.1",
            "conditions": [
                {"type": name, "status": str(holds), "lastTransitionTime": self._since}
                for name, holds in conditions.items()
            ],
            "containerStatuses": [state.report() for state in self.containers],
        }
