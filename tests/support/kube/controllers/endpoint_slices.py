"""The controller of EndpointSlices: which pods are behind a Service, and whether they serve."""

from __future__ import annotations

import hashlib

from tests.support.kube.controllers import pods
from tests.support.kube.resources import ENDPOINT_SLICES, PODS, SERVICES, Json
from tests.support.kube.selectors import matches_labels
from tests.support.kube.store import Key, Store

SERVICE_NAME = "kubernetes.io/service-name"


def reconcile(store: Store, max_endpoints: int) -> None:
    """Has the slices of each Service say what its pods are; at most so many in one slice."""
    for service in store.list(SERVICES):
        if service["spec"].get("selector"):
            _reconcile(store, service, max_endpoints)


def _reconcile(store: Store, service: Json, max_endpoints: int) -> None:
    namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
    behind = [
        pod
        for pod in store.list(PODS, namespace)
        if matches_labels(service["spec"]["selector"], pod)
        and pod.get("status", {}).get("podIP")
        and not pods.is_finished(pod)
    ]
    parts = [
        behind[start : start + max_endpoints]
        for start in range(0, max(1, len(behind)), max_endpoints)
    ]
    wanted = {
        _slice_name(name, number): _slice(service, part, number)
        for number, part in enumerate(parts)
    }
    for item in store.list(ENDPOINT_SLICES, namespace, _of(name)):
        if item["metadata"]["name"] not in wanted:
            store.delete(Key(ENDPOINT_SLICES, namespace, item["metadata"]["name"]))
    for slice_name, item in wanted.items():
        _put(store, Key(ENDPOINT_SLICES, namespace, slice_name), item)


def _of(service: str):
    return lambda item: item["metadata"].get("labels", {}).get(SERVICE_NAME) == service


def _slice_name(service: str, number: int) -> str:
    return f"{service}-{hashlib.sha256(f'{service} {number}'.encode()).hexdigest()[:5]}"


def _put(store: Store, key: Key, item: Json) -> None:
    if any(
        each["metadata"]["name"] == key.name for each in store.list(key.resource, key.namespace)
    ):
        changed = {name: item[name] for name in ("endpoints", "ports")}
        store.update(key, lambda old: {**old, **changed})
    else:
        store.create(key.resource, item, key.namespace)


def _slice(service: Json, behind: list[Json], number: int) -> Json:
    metadata = service["metadata"]
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "metadata": {
            "name": _slice_name(metadata["name"], number),
            "labels": {SERVICE_NAME: metadata["name"]},
            "ownerReferences": [owner],
        },
        "addressType": "IPv4",
        # A slice without pods has no list at all, as the real one writes it.
        "endpoints": [_endpoint(service, pod) for pod in behind] or None,
        "ports": [_port(port, behind) for port in service["spec"].get("ports", [])],
    }


def _endpoint(service: Json, pod: Json) -> Json:
    ready, ending = pods.is_ready(pod), pods.is_terminating(pod)
    metadata = pod["metadata"]
    endpoint = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {
            "ready": bool(service["spec"].get("publishNotReadyAddresses"))
            or (ready and not ending),
            "serving": ready,
            "terminating": ending,
        },
        "nodeName": pod["spec"].get("nodeName"),
        "targetRef": {
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }
    if pod["spec"].get("subdomain") == service["metadata"]["name"]:
        endpoint["hostname"] = pod["spec"].get("hostname")
    return endpoint


def _port(port: Json, behind: list[Json]) -> Json:
    target = port["targetPort"]
    if isinstance(target, str):
        named = (
            each["containerPort"]
            for pod in behind
            for container in pod["spec"]["containers"]
            for each in container.get("ports", [])
            if each.get("name") == target
        )
        target = next(named, None)
    return {"name": port.get("name", ""), "port": target, "protocol": port["protocol"]}
