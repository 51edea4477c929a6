"""Pods that nobody runs: a StatefulSet makes them, and the test says what a kubelet would."""

from __future__ import annotations

from tests.cluster.servers import NAMESPACE, Server
from tests.support.kube.resources import NODES, PODS, SERVICES, STATEFUL_SETS, Json

PORT = 50061
NODE = "node"


async def apply(
    server: Server, replicas: int, name: str = "pods", *, publish_not_ready: bool = False
) -> None:
    """Makes a node, a headless Service, and a StatefulSet that does all at once."""
    labels = {"app": name}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": publish_not_ready,
        "selector": labels,
        "ports": [{"name": "grpc", "port": PORT, "targetPort": "grpc"}],
    }
    named = {"metadata": {"name": name}}
    await server.client.create(NODES, {"metadata": {"name": NODE}})
    await server.client.create(SERVICES, {**named, "spec": service}, NAMESPACE)
    await server.client.create(STATEFUL_SETS, stateful_set(name, replicas), NAMESPACE)


def stateful_set(name: str, replicas: int) -> Json:
    """Of pods with one port."""
    labels = {"app": name}
    container = {
        "name": "main",
        "image": "none",
        "ports": [{"name": "grpc", "containerPort": PORT}],
    }
    spec = {
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    }
    return {"metadata": {"name": name}, "spec": spec}


async def scale(server: Server, replicas: int) -> None:
    """Has the StatefulSet make or end pods."""
    patch = {"spec": {"replicas": replicas}}
    await server.client.patch(STATEFUL_SETS, NAMESPACE, "pods", patch, "/scale")


async def run(server: Server, name: str, *, ready: bool) -> None:
    """Binds a pod, or has it say that it is ready or not, as scheduler and kubelet do."""
    pod = await server.client.get(PODS, NAMESPACE, name)
    if not pod["spec"].get("nodeName"):
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        node = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        path = PODS.path(NAMESPACE, name) + "/binding"
        await server.client.request("POST", path, body={**body, "target": node})
    address = address_of(name)
    now = pod["metadata"]["creationTimestamp"]
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    patch = {"status": {**status, "conditions": [condition]}}
    await server.client.patch(PODS, NAMESPACE, name, patch, "/status")


def address_of(name: str) -> str:
    """Of a pod, by its number."""
    return f"10.77.0.{1 + int(name.rpartition('-')[2])}"


async def end(server: Server, name: str) -> None:
    """Says that a pod has ended."""
    await server.client.delete(PODS, NAMESPACE, name, {"gracePeriodSeconds": 0})
