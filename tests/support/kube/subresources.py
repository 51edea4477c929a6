"""Parts of objects that have a path of their own: status, scale, binding, eviction."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.kube.resources import DISRUPTION_BUDGETS, ApiError, Json, bad_request
from tests.support.kube.selectors import matches_labels
from tests.support.kube.store import Key, Store

Change = Callable[[Json], Json]


def read(store: Store, key: Key, name: str) -> Json:
    """What GET answers."""
    item = store.get(key)
    return _scale_of(item) if name == "scale" else item


def write(store: Store, key: Key, name: str, change: Change) -> Json:
    """Changes only that part, and answers with what PUT and PATCH do."""
    if name == "scale":
        return _scale_of(store.update(key, lambda old: _with_scale(old, change(_scale_of(old)))))

    def with_status(old: Json) -> Json:
        new = change(old)
        version = new["metadata"].get("resourceVersion")
        metadata = {**old["metadata"], "resourceVersion": version}
        return {**old, "metadata": metadata, "status": new.get("status", {})}

    return store.update(key, with_status)


def post(store: Store, key: Key, name: str, body: Json) -> Json:
    """Binds a pod to a node, or evicts one if the disruption budgets allow it."""
    if name == "binding":
        node = body["target"]["name"]
        store.update(key, lambda old: {**old, "spec": {**old["spec"], "nodeName": node}})
    elif name == "eviction":
        _refuse_disruption(store, store.get(key))
        store.delete(key, (body.get("deleteOptions") or {}).get("gracePeriodSeconds"))
    else:
        raise bad_request(f"nothing can be posted to {name}")
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _scale_of(item: Json) -> Json:
    metadata = item["metadata"]
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    labels = item["spec"]["selector"]["matchLabels"]
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in names},
        "spec": {"replicas": item["spec"]["replicas"]},
        "status": {
            "replicas": item.get("status", {}).get("replicas", 0),
            "selector": ",".join(f"{name}={value}" for name, value in sorted(labels.items())),
        },
    }


def _with_scale(item: Json, scale: Json) -> Json:
    replicas = scale["spec"].get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        raise ApiError(422, "Invalid", f"spec.replicas: Invalid value: {replicas!r}")
    version = scale["metadata"].get("resourceVersion")
    metadata = {**item["metadata"], "resourceVersion": version}
    return {**item, "metadata": metadata, "spec": {**item["spec"], "replicas": replicas}}


def _refuse_disruption(store: Store, pod: Json) -> None:
    for budget in store.list(DISRUPTION_BUDGETS, pod["metadata"]["namespace"]):
        wanted = budget["spec"]["selector"].get("matchLabels", {})
        allowed = budget.get("status", {}).get("disruptionsAllowed", 0)
        if matches_labels(wanted, pod) and allowed <= 0:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            raise ApiError(429, "TooManyRequests", message)
