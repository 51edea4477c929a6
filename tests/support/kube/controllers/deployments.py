"""The controller of Deployments, as far as rolling updates need it; pods belong to it directly.

There are no ReplicaSets in between, so nothing can be rolled back.
"""

from __future__ import annotations

from tests.support.kube.controllers import pods
from tests.support.kube.resources import DEPLOYMENTS, Json
from tests.support.kube.store import Store

_HASH = "pod-template-hash"


def reconcile(store: Store) -> None:
    """Takes the next step for each Deployment."""
    for item in store.list(DEPLOYMENTS):
        _reconcile(store, item)


def _reconcile(store: Store, item: Json) -> None:
    everyone = pods.owned(store, item)
    for pod in everyone:
        if pods.is_finished(pod):
            pods.delete(store, pod)
    alive = [pod for pod in everyone if not pods.is_terminating(pod)]
    version = pods.template_hash(item)
    new = [pod for pod in alive if pod["metadata"]["labels"][_HASH] == version]
    old = [pod for pod in alive if pod not in new]
    if item["spec"]["strategy"].get("type") == "Recreate":
        _end(store, old)
        num_missing = 0 if len(everyone) > len(new) else item["spec"]["replicas"] - len(new)
    else:
        num_missing = _roll(store, item, new, old)
    for _ in range(num_missing):
        name = {"generateName": f"{item['metadata']['name']}-{version}-"}
        pods.create(store, item, name, {_HASH: version})
    _end(store, new[item["spec"]["replicas"] :])
    _report(store, item, new, old)


def _roll(store: Store, item: Json, new: list[Json], old: list[Json]) -> int:
    """Ends old pods that can be spared; returns how many new ones there may be more."""
    replicas, limits = item["spec"]["replicas"], item["spec"]["strategy"]["rollingUpdate"]
    surge = pods.share(limits["maxSurge"], replicas, up=True)
    unavailable = pods.share(limits["maxUnavailable"], replicas, up=False)
    min_ready_s = item["spec"].get("minReadySeconds", 0)
    num_available = sum(pods.is_available(pod, min_ready_s) for pod in (*new, *old))
    num_spare = num_available - (replicas - unavailable)
    idle = [pod for pod in old if not pods.is_available(pod, min_ready_s)]
    busy = [pod for pod in old if pod not in idle]
    _end(store, [*idle, *busy[: max(0, num_spare)]])
    return min(replicas - len(new), replicas + surge - len(new) - len(old))


def _end(store: Store, members: list[Json]) -> None:
    for pod in members:
        pods.delete(store, pod)


def _report(store: Store, item: Json, new: list[Json], old: list[Json]) -> None:
    alive, min_ready_s = [*new, *old], item["spec"].get("minReadySeconds", 0)
    num_available = sum(pods.is_available(pod, min_ready_s) for pod in alive)
    status = {
        "replicas": len(alive),
        "updatedReplicas": len(new),
        "readyReplicas": sum(map(pods.is_ready, alive)),
        "availableReplicas": num_available,
        "unavailableReplicas": max(0, item["spec"]["replicas"] - num_available),
    }
    pods.set_status(store, DEPLOYMENTS, item, status)
