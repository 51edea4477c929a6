"""What a mesh relies on of controllers: those of the tests do it as the real ones do.

Nobody runs pods here: the test says what a kubelet would. The same checks run against a real
control plane where `ETCD_BIN`, `KUBE_APISERVER_BIN` and `KUBE_CONTROLLER_MANAGER_BIN` name its
binaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster import workload
from tests.cluster.servers import NAMESPACE, Server
from tests.support.kube.controllers.pods import is_terminating
from tests.support.kube.resources import (
    DISRUPTION_BUDGETS,
    ENDPOINT_SLICES,
    PODS,
    STATEFUL_SETS,
    ApiError,
    Json,
)

Conditions = tuple[bool, bool, bool]
"""Of an endpoint: ready, serving, terminating."""


def _are(names: Sequence[str]) -> Callable[[list[Json]], bool]:
    return lambda items: sorted(item["metadata"]["name"] for item in items) == list(names)


def _show(expected: dict[str, Conditions]) -> Callable[[list[Json]], bool]:
    """Whether the Service's slices have just these pods, as they are told."""

    def matches(slices: list[Json]) -> bool:
        shown = {
            endpoint["targetRef"]["name"]: tuple(
                endpoint["conditions"][name] for name in ("ready", "serving", "terminating")
            )
            for item in slices
            if item["metadata"]["labels"]["kubernetes.io/service-name"] == "pods"
            for endpoint in item.get("endpoints") or []
        }
        return shown == expected

    return matches


async def test_life_of_endpoints(server: Server) -> None:
    """Starting, ready, told to end but serving, drained, gone; the highest numbers go, at once."""
    await workload.apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    await workload.scale(server, 3)
    await server.wait(PODS, _are(["pods-0", "pods-1", "pods-2"]))
    names = [f"pods-{number}" for number in range(3)]
    for name in names:
        await workload.run(server, name, ready=False)
    await server.wait(ENDPOINT_SLICES, _show(dict.fromkeys(names, (False, False, False))))
    for name in names:
        await workload.run(server, name, ready=True)
    await server.wait(ENDPOINT_SLICES, _show(dict.fromkeys(names, (True, True, False))))

    await workload.scale(server, 1)
    leaving = {"pods-0": (True, True, False)} | dict.fromkeys(names[1:], (False, True, True))
    await server.wait(ENDPOINT_SLICES, _show(leaving))
    for name in names[1:]:
        await workload.run(server, name, ready=False)
    drained = {"pods-0": (True, True, False)} | dict.fromkeys(names[1:], (False, False, True))
    await server.wait(ENDPOINT_SLICES, _show(drained))
    for name in names[1:]:
        await workload.end(server, name)
    await server.wait(ENDPOINT_SLICES, _show({"pods-0": (True, True, False)}))
    await server.wait(PODS, _are(["pods-0"]))


async def test_published_addresses_say_ready_of_all(server: Server) -> None:
    """With publishNotReadyAddresses only `serving` is honest."""
    await workload.apply(server, 1, publish_not_ready=True)
    await server.wait(PODS, _are(["pods-0"]))
    await workload.run(server, "pods-0", ready=False)
    await server.wait(ENDPOINT_SLICES, _show({"pods-0": (True, False, False)}))


async def test_rolling_update_goes_from_the_highest_down(server: Server) -> None:
    """One pod at a time, and the next one once that is ready again."""
    await workload.apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    for name in ("pods-0", "pods-1"):
        await workload.run(server, name, ready=True)
    old = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await server.wait(PODS, bool)}
    change = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
    await server.client.patch(STATEFUL_SETS, NAMESPACE, "pods", change)
    for name in ("pods-1", "pods-0"):
        pods = await server.wait(PODS, lambda pods: any(map(is_terminating, pods)))
        assert [pod["metadata"]["name"] for pod in pods if is_terminating(pod)] == [name]
        await workload.end(server, name)
        await server.wait(PODS, lambda pods, name=name: _is_new(pods, name, old[name]))
        await workload.run(server, name, ready=True)

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
    await workload.apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    for name in ("pods-0", "pods-1"):
        await workload.run(server, name, ready=True)
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "pods"}}}
    budget = {"metadata": {"name": "pods"}, "spec": spec}
    await server.client.create(DISRUPTION_BUDGETS, budget, NAMESPACE)
    await server.wait(DISRUPTION_BUDGETS, _allow(1))
    await _evict(server, "pods-1")
    await server.wait(DISRUPTION_BUDGETS, _allow(0))
    with pytest.raises(ApiError) as caught:
        await _evict(server, "pods-0")
    assert caught.value.code == 429
    await workload.end(server, "pods-1")
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    await workload.run(server, "pods-1", ready=True)
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
    await workload.apply(server, 2)
    await server.wait(PODS, _are(["pods-0", "pods-1"]))
    options = {"propagationPolicy": "Background"}
    await server.client.delete(STATEFUL_SETS, NAMESPACE, "pods", options)
    await server.wait(PODS, _are([]))
