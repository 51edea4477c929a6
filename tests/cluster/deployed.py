"""ExpertMesh on a pocket cluster: what `kubectl apply -k` has made, and what is done to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.harness.load import Load
from tests.cluster.overlay import NAMESPACE, write_overlay
from tests.support.api import Api
from tests.support.kube.controllers.pods import is_ready, is_terminating
from tests.support.kube.pocket_cluster import PocketCluster, pocket_cluster
from tests.support.kube.resources import PODS, Json
from tests.support.processes import poll

EXPERTS, GATEWAYS = "statefulset/expert-worker", "deployment/gateway"
TIMEOUT_S = 180.0
"""Of everything that is waited for: the machine may be busy, or kernels have to be compiled."""
_EXPERT_PORT = 50061
_MIN_COPIES = 2


class Deployed:
    """One mesh; made by `deployed`.

    Args:
        cluster: Where its pods run.
    """

    def __init__(self, cluster: PocketCluster) -> None:
        self.cluster = cluster
        self.port = cluster.port_of("gateway", "http")
        """Of the Service of gateways."""
        self.api = Api(self.port)

    def expert_pods(self) -> list[Json]:
        """Pods of expert workers that are not ending."""
        pods = _named("expert-worker", self.cluster.list(PODS))
        return [pod for pod in pods if not is_terminating(pod)]

    def gateway_pods(self) -> list[Json]:
        """Pods of gateways, those that are ending included."""
        return _named("gateway", self.cluster.list(PODS))

    def wait_ready(self, count: int) -> None:
        """Waits until there are so many expert workers, and no others."""

        def are_ready(pods: list[Json]) -> bool:
            members = _named("expert-worker", pods)
            return len(members) == count and all(map(is_ready, members))

        what = f"{count} expert workers are ready"
        self.cluster.wait(PODS, are_ready, what=what, timeout_s=TIMEOUT_S)

    def restarts(self, name: str) -> int:
        """How often the container of a pod was started again."""
        (pod,) = (pod for pod in self.expert_pods() if pod["metadata"]["name"] == name)
        return int(pod["status"]["containerStatuses"][0]["restartCount"])

    def wait_restarted(self, name: str, before: int) -> None:
        """Waits until that is more than it was before, and the pod is ready."""

        def is_restarted(pods: list[Json]) -> bool:
            (pod,) = (pod for pod in pods if pod["metadata"]["name"] == name)
            return self.restarts(name) > before and is_ready(pod)

        what = f"{name} is ready again"
        self.cluster.wait(PODS, is_restarted, what=what, timeout_s=TIMEOUT_S)

    def wait_rolled_out(self, workload: str) -> None:
        """Waits until all pods of a workload are new, as kubectl says."""
        wait = ("rollout", "status", workload, f"--timeout={TIMEOUT_S:.0f}s")
        self.cluster.kubectl(*wait, timeout_s=TIMEOUT_S)

    def wait_placed(self, count: int) -> None:
        """Waits until so many expert workers hold two copies of each expert, and nothing moves."""

        def is_placed() -> bool:
            report = self.api.get("/admin/placement").json
            return (
                report["leader"]
                and len(report["workers"]) == count
                and report["fewest_copies"] >= _MIN_COPIES
                and not (report["plan"] or {}).get("moves")
            )

        try:
            poll(is_placed, timeout_s=TIMEOUT_S, what=f"{count} expert workers hold all experts")
        except AssertionError as error:
            report = self.api.get("/admin/placement").json
            raise AssertionError(f"{error}\n{report}\n{self.cluster.logs()}") from None

    def knows_pods(self) -> bool:
        """Whether the gateway can use every expert worker that runs, and names no other."""
        report = self.api.ready().json
        known = {worker["address"] for worker in report["workers"] if worker["state"] == "ready"}
        running = {f"{pod['status']['podIP']}:{_EXPERT_PORT}" for pod in self.expert_pods()}
        return known == running and len(report["workers"]) == len(known)

    def settle(self, load: Load, count: int, num_tokens: int) -> None:
        """Waits until so many pods serve with all experts, and streams go on."""
        self.wait_ready(count)
        self.wait_placed(count)
        load.wait_tokens(num_tokens)

    def incarnations(self) -> dict[str, str]:
        """Name to uid of the pods of expert workers."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.expert_pods()}


def _named(name: str, pods: list[Json]) -> list[Json]:
    return [pod for pod in pods if pod["metadata"]["labels"].get("app.kubernetes.io/name") == name]


@contextmanager
def deployed(model: Path, times: dict[str, float]) -> Iterator[Deployed]:
    """Applies the overlay for pocket clusters, and waits until all experts are placed.

    Args:
        model: A checkpoint.
        times: Is told how long it takes.
    """
    with pocket_cluster(NAMESPACE) as cluster:
        overlay = write_overlay(cluster.folder, model, cluster.kubeconfig_of("gateway"))
        with timed(times, "apply -k, until all experts are placed"):
            cluster.kubectl("apply", "-k", str(overlay))
            mesh = Deployed(cluster)
            mesh.wait_ready(2)
            mesh.wait_rolled_out(GATEWAYS)
            mesh.wait_placed(2)
        yield mesh


@contextmanager
def timed(times: dict[str, float], what: str) -> Iterator[None]:
    """Notes the seconds that something takes."""
    started_s = time.monotonic()
    yield
    times[what] = time.monotonic() - started_s
