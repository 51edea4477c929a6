"""The controller of StatefulSets: pods with numbers, updated from the highest one down."""

from __future__ import annotations

from tests.support.kube.controllers import pods
from tests.support.kube.resources import STATEFUL_SETS, Json
from tests.support.kube.store import Store

REVISION = "controller-revision-hash"
_INDEX = "apps.kubernetes.io/pod-index"
_POD_NAME = "statefulset.kubernetes.io/pod-name"


def reconcile(store: Store) -> None:
    """Takes the next step for each StatefulSet."""
    for item in store.list(STATEFUL_SETS):
        _reconcile(store, item)


def _reconcile(store: Store, item: Json) -> None:
    by_ordinal = {_ordinal(pod): pod for pod in pods.owned(store, item)}
    for pod in by_ordinal.values():
        if pods.is_finished(pod):
            pods.delete(store, pod)
    if not _scale(store, item, by_ordinal):
        _update(store, item, by_ordinal)
    _report(store, item, by_ordinal)


def _ordinal(pod: Json) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _revision(item: Json) -> str:
    return f"{item['metadata']['name']}-{pods.template_hash(item)}"


def _scale(store: Store, item: Json, by_ordinal: dict[int, Json]) -> bool:
    """Makes what is missing, ends what is too much; True if there was any.

    `Parallel` does all at once, otherwise one pod waits for the one before it.
    """
    wanted = range(item["spec"]["replicas"])
    missing = [ordinal for ordinal in wanted if ordinal not in by_ordinal]
    excess = sorted((ordinal for ordinal in by_ordinal if ordinal not in wanted), reverse=True)
    if item["spec"]["podManagementPolicy"] != "Parallel":
        lower = [pod for ordinal, pod in by_ordinal.items() if missing and ordinal < missing[0]]
        missing = missing[:1] if all(map(pods.is_ready, lower)) else []
        excess = excess[:1]
    for ordinal in missing:
        _create(store, item, ordinal)
    for ordinal in excess:
        pods.delete(store, by_ordinal[ordinal])
    return bool(missing or excess)


def _create(store: Store, item: Json, ordinal: int) -> None:
    name = f"{item['metadata']['name']}-{ordinal}"
    labels = {REVISION: _revision(item), _INDEX: str(ordinal), _POD_NAME: name}
    claims = [
        {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
        for each in item["spec"].get("volumeClaimTemplates", [])
        for claim in [each["metadata"]["name"]]
    ]
    volumes = [*item["spec"]["template"]["spec"].get("volumes", []), *claims]
    place = {"hostname": name, "subdomain": item["spec"].get("serviceName", "")}
    pods.create(store, item, {"name": name}, labels, volumes=volumes, **place)


def _update(store: Store, item: Json, by_ordinal: dict[int, Json]) -> None:
    """Ends the highest pod of an old revision, unless one above it is not available yet."""
    for ordinal in sorted(by_ordinal, reverse=True):
        pod = by_ordinal[ordinal]
        if pods.is_terminating(pod):
            return
        if pod["metadata"]["labels"][REVISION] != _revision(item):
            pods.delete(store, pod)
            return
        if not pods.is_available(pod, item["spec"].get("minReadySeconds", 0)):
            return


def _report(store: Store, item: Json, by_ordinal: dict[int, Json]) -> None:
    revision, min_ready_s = _revision(item), item["spec"].get("minReadySeconds", 0)
    members = list(by_ordinal.values())
    updated = [pod for pod in members if pod["metadata"]["labels"][REVISION] == revision]
    is_current = len(updated) == len(members) and all(map(pods.is_ready, members))
    old = item.get("status", {}).get("currentRevision", revision)
    status = {
        "replicas": len(members),
        "readyReplicas": sum(map(pods.is_ready, members)),
        "availableReplicas": sum(pods.is_available(pod, min_ready_s) for pod in members),
        "updatedReplicas": len(updated),
        "currentReplicas": len(updated) if is_current else len(members) - len(updated),
        "currentRevision": revision if is_current else old,
        "updateRevision": revision,
    }
    pods.set_status(store, STATEFUL_SETS, item, status)
