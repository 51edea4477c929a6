"""What the API server fills in where a manifest says nothing, as far as anybody here reads it."""

from __future__ import annotations

from tests.support.kube.resources import (
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
    Json,
    Resource,
)

_TEN_MINUTES_S = 600


def filled_in(resource: Resource, item: Json) -> Json:
    """The object with kind, version and defaults."""
    item.update(apiVersion=resource.api_version, kind=resource.kind)
    item.setdefault("metadata", {})
    if fill := _FILLERS.get(resource):
        fill(item)
    return item


def _stateful_set(item: Json) -> None:
    spec = item["spec"]
    spec.setdefault("replicas", 1)
    spec.setdefault("podManagementPolicy", "OrderedReady")
    spec.setdefault("updateStrategy", {"type": "RollingUpdate"})
    _pod_spec(spec["template"])
    item["status"] = {"replicas": 0}


def _deployment(item: Json) -> None:
    spec = item["spec"]
    spec.setdefault("replicas", 1)
    spec.setdefault("progressDeadlineSeconds", _TEN_MINUTES_S)
    strategy = spec.setdefault("strategy", {"type": "RollingUpdate"})
    if strategy.get("type", "RollingUpdate") == "RollingUpdate":
        quarter = {"maxSurge": "25%", "maxUnavailable": "25%"}
        strategy["rollingUpdate"] = {**quarter, **strategy.get("rollingUpdate", {})}
    _pod_spec(spec["template"])
    item["status"] = {}


def _pod(item: Json) -> None:
    _pod_spec(item)
    item["status"] = {"phase": "Pending"}


def _pod_spec(holder: Json) -> None:
    spec = holder["spec"]
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("restartPolicy", "Always")


def _service(item: Json) -> None:
    spec = item["spec"]
    spec.setdefault("type", "ClusterIP")
    for port in spec.get("ports", []):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _secret(item: Json) -> None:
    item.setdefault("type", "Opaque")


def _namespace(item: Json) -> None:
    item["status"] = {"phase": "Active"}


_FILLERS = {
    STATEFUL_SETS: _stateful_set,
    DEPLOYMENTS: _deployment,
    PODS: _pod,
    SERVICES: _service,
    SECRETS: _secret,
    NAMESPACES: _namespace,
}
