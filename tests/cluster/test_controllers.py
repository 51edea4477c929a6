"""What a mesh relies on of controllers: those of the tests do it as the real ones do.

Nobody runs pods here: the test says what a kubelet would. The same checks run against a real
control plane where `ETCD_BIN`, `KUBE_APISERVER_BIN` and `KUBE_CONTROLLER_MANAGER_BIN` name its
binaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster.servers import NAMESPACE, Server
from tests.support.kube.controllers.pods import is_terminating
from tests.support.kube.resources import (
    DISRUPTION_BUDGETS,
    ENDPOINT_SLICES,
    NODES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    ApiError,
    Json,
)

LABELS = {"app": "pods"}
Conditions = tuple[bool, bool, bool]
"""Of an endpoint: ready, serving, terminating."""


async def _apply(server: Server, replicas: int, *, publish_not_ready: bool = False) -> None:
    """A node, a headless Service, and a StatefulSet that does all at once."""
    container = {
        "name": "main",
        "image": "none",
        "ports": [{"name": "grpc", "containerPort": 50061}],
    }
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": publish_not_ready,
        "selector": LABELS,
        "ports": [{"name": "grpc", "port": 50061, "targetPort": "grpc"}],
    }
    stateful_set = {
        "serviceName": "pods",
        "podManagementPolicy": "Parallel",
        "replicas": replicas,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [container]}},
    }
    named = {"metadata": {"name": "pods"}}
    await server.client.create(NODES, {"metadata": {"name": "node"}})
    await server.client.create(SERVICES, {**named, "spec": service}, NAMESPACE)
    await server.client.create(STATEFUL_SETS, {**named, "spec": stateful_set}, NAMESPACE)


async def _scale(server: Server, replicas: int) -> None:
    patch = {"spec": {"replicas": replicas}}
    await server.client.patch(STATEFUL_SETS, NAMESPACE, "pods", patch, "/scale")


async def _run(server: Server, name: str, *, ready: bool) -> None:
    """Binds a pod, or has it say that it is ready or not, as scheduler and kubelet do."""
    pod = await server.client.get(PODS, NAMESPACE, name)
    if not pod["spec"].get("nodeName"):
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        node = {"apiVersion": "v1", "kind": "Node", "name": "node"}
        path = PODS.path(NAMESPACE, name) + "/binding"
        await server.client.request("POST", path, body={**body, "target": node})
    address = f"10.77.0.{1 + int(name.rpartition('-')[2])}"
    now = pod["metadata"]["creationTimestamp"]
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    patch = {"status": {**status, "conditions": [condition]}}
    await server.client.patch(PODS, NAMESPACE, name, patch, "/status")


async def _end(server: Server, name: str) -> None:
    """Says that a pod has ended."""
    await server.client.delete(PODS, NAMESPACE, name, {"gracePeriodSeconds": 0})


def _are(names: Sequence[str]) -> Callable[[list[Json]], bool]:
    return lambda items: sorted(item["metadata"]["name"] for item in items) == list(names)


def _show(expected: dict[str, Conditions]) -> Callable[[list[Json]], bool]:
    """Whether slices have just these pods, as they are told."""

    def matches(slices: list[Json]) -> bool:
        shown = {
            endpoint["targetRef"]["name"]: tuple(
                endpoint["conditions"][name] for name in ("ready", "serving", "terminating")
            )
            for item in slices
            for endpoint in item.get("endpoints") or []
        }
        return shown == expected

    return matches


async def test_life_of_endpoints(server: Server) -> None:
    """Starting, ready, told to end but serving, drained, gone; the highest numbers go, at once."""
    await _apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    await _scale(server, 3)
    await server.wait(PODS, _are(["pods-0", "pods-1", "pods-2"]))
    names = [f"pods-{number}" for number in range(3)]
    for name in names:
        await _run(server, name, ready=False)
    await server.wait(ENDPOINT_SLICES, _show(dict.fromkeys(names, (False, False, False))))
    for name in names:
        await _run(server, name, ready=True)
    await server.wait(ENDPOINT_SLICES, _show(dict.fromkeys(names, (True, True, False))))

    await _scale(server, 1)
    leaving = {"pods-0": (True, True, False)} | dict.fromkeys(names[1:], (False, True, True))
    await server.wait(ENDPOINT_SLICES, _show(leaving))
    for name in names[1:]:
        await _run(server, name, ready=False)
    drained = {"pods-0": (True, True, False)} | dict.fromkeys(names[1:], (False, False, True))
    await server.wait(ENDPOINT_SLICES, _show(drained))
    for name in names[1:]:
        await _end(server, name)
    await server.wait(ENDPOINT_SLICES, _show({"pods-0": (True, True, False)}))
    await server.wait(PODS, _are(["pods-0"]))


async def test_published_addresses_say_ready_of_all(server: Server) -> None:
    """With publishNotReadyAddresses only `serving` is honest."""
    await _apply(server, 1, publish_not_ready=True)
    await server.wait(PODS, _are(["pods-0"]))
    await _run(server, "pods-0", ready=False)
    await server.wait(ENDPOINT_SLICES, _show({"pods-0": (True, False, False)}))


async def test_rolling_update_goes_from_the_highest_down(server: Server) -> None:
    """One pod at a time, and the next one once that is ready again."""
    await _apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    for name in ("pods-0", "pods-1"):
        await _run(server, name, ready=True)
    old = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await server.wait(PODS, bool)}
    change = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
    await server.client.patch(STATEFUL_SETS, NAMESPACE, "pods", change)
    for name in ("pods-1", "pods-0"):
        pods = await server.wait(PODS, lambda pods: any(map(is_terminating, pods)))
        assert [pod["metadata"]["name"] for pod in pods if is_terminating(pod)] == [name]
        await _end(server, name)
        await server.wait(PODS, lambda pods, name=name: _is_new(pods, name, old[name]))
        await _run(server, name, ready=True)

    def is_told(items: list[Json]) -> bool:
        status = items[0]["status"]
        return status["updateRevision"] == status["currentRevision"]

    await server.wait(STATEFUL_SETS, is_told)


def _is_new(pods: list[Json], name: str, old_uid: str) -> bool:
    return any(
        pod["metadata"]["name"] == name and pod["metadata"]["uid"] != old_uid for pod in pods
    )


async def test_evictions_stay_within_the_budget(server: Server) -> None:
    """One pod may be evicted; no other one before it is there again."""
    await _apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    for name in ("pods-0", "pods-1"):
        await _run(server, name, ready=True)
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}
    budget = {"metadata": {"name": "pods"}, "spec": spec}
    await server.client.create(DISRUPTION_BUDGETS, budget, NAMESPACE)
    await server.wait(DISRUPTION_BUDGETS, _allow(1))
    await _evict(server, "pods-1")
    await server.wait(DISRUPTION_BUDGETS, _allow(0))
    with pytest.raises(ApiError) as caught:
        await _evict(server, "pods-0")
    assert caught.value.code == 429
    await _end(server, "pods-1")
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    await _run(server, "pods-1", ready=True)
    await server.wait(DISRUPTION_BUDGETS, _allow(1))
    await _evict(server, "pods-0")
    await server.client.delete(DISRUPTION_BUDGETS, NAMESPACE, "pods")


def _allow(count: int) -> Callable[[list[Json]], bool]:
    return lambda budgets: budgets[0].get("status", {}).get("disruptionsAllowed") == count


async def _evict(server: Server, name: str) -> None:
    """As `kubectl drain` does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = PODS.path(NAMESPACE, name) + "/eviction"
    await server.client.request("POST", path, body=body)


async def test_deleted_owners_take_their_pods_along(server: Server) -> None:
    """Nothing is left of a StatefulSet."""
    await _apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    options = {"propagationPolicy": "Background"}
    await server.client.delete(STATEFUL_SETS, NAMESPACE, "pods", options)
    await server.wait(PODS, _are([]))
