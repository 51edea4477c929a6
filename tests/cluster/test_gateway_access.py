"""What a gateway does to a cluster, with the rights that deploy/base gives it, and no others.

The same checks run against a real control plane where `ETCD_BIN`, `KUBE_APISERVER_BIN` and
`KUBE_CONTROLLER_MANAGER_BIN` name its binaries: its controllers, its Lease, its access control.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from expertmesh.expert_source import KubernetesService
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi, ClusterError
from gateway.mesh.discovery import Endpoint, Endpoints
from gateway.mesh.service_discovery import ServiceDiscovery
from gateway.placement.lease_election import LeaseElection
from gateway.scaling.scale_target import ScaleError
from gateway.scaling.stateful_set import StatefulSetScale
from tests.cluster import workload
from tests.cluster.servers import NAMESPACE, Server
from tests.support.endpoint_slices import until
from tests.support.kube.client import MERGE_PATCH
from tests.support.kube.resources import (
    ENDPOINT_SLICES,
    LEASES,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    STATEFUL_SETS,
)
from tests.support.manifests import DEPLOY

EXPERTS, LEASE = "expert-worker", "expertmesh-leader"
FORBIDDEN = (
    ("GET", NODES.path()),
    ("GET", PODS.path(NAMESPACE)),
    ("GET", SECRETS.path(NAMESPACE)),
    ("GET", ENDPOINT_SLICES.path("kube-system")),
    ("GET", LEASES.path(NAMESPACE)),
    ("PUT", LEASES.path(NAMESPACE, "another")),
    ("DELETE", LEASES.path(NAMESPACE, LEASE)),
    ("GET", STATEFUL_SETS.path(NAMESPACE, EXPERTS)),
    ("PATCH", STATEFUL_SETS.path(NAMESPACE, EXPERTS)),
    ("PATCH", STATEFUL_SETS.path(NAMESPACE, "another") + "/scale"),
)
KINDS = {each.kind: each for each in (ROLES, ROLE_BINDINGS, SERVICE_ACCOUNTS)}
Open = Callable[[], Awaitable[ClusterApi]]


@pytest.fixture
async def as_gateway(server: Server, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens clients that show the token of the gateways' service account."""
    for name in ("serviceaccounts.yaml", "rbac.yaml"):
        for item in yaml.safe_load_all((DEPLOY / "base" / name).read_text()):
            await server.client.create(KINDS[item["kind"]], item, NAMESPACE)
    path = tmp_path / "kubeconfig"
    path.write_text(await server.kubeconfig_of("gateway"))
    async with AsyncExitStack() as stack:

        async def opened() -> ClusterApi:
            api = await asyncio.to_thread(ClusterApi.open, ClusterAccess(str(path)))
            stack.push_async_callback(api.close)
            return api

        yield opened


async def test_discovery_follows_pods(server: Server, as_gateway: Open) -> None:
    """As the EndpointSlices of their Service tell: starting, ready, leaving, gone."""
    heard: list[Endpoints] = []
    discovery = ServiceDiscovery(await as_gateway(), KubernetesService(EXPERTS))
    await workload.apply(server, 1, EXPERTS)
    await server.wait(PODS, lambda pods: len(pods) == 1)
    discovery.start(heard.append)
    try:
        name = f"{EXPERTS}-0"
        address = f"{workload.address_of(name)}:{workload.PORT}"
        await workload.run(server, name, ready=False)
        await until(lambda: discovery.report().num_down == 1, lambda: str(discovery.report()))
        await workload.run(server, name, ready=True)
        await until(lambda: heard[-1:] == [(Endpoint(address, node=workload.NODE),)])
        await server.client.delete(PODS, NAMESPACE, name)
        await until(lambda: heard[-1:] == [(Endpoint(address, True, workload.NODE),)])
        await workload.end(server, name)
        await until(lambda: heard[-1:] == [()])
    finally:
        await asyncio.to_thread(discovery.stop)


async def test_a_lease_passes_from_one_to_the_next(server: Server, as_gateway: Open) -> None:
    """The first makes it and gives it back; the second takes it with a higher token."""
    tokens: list[int] = []
    for terms in (1, 2):
        election = LeaseElection(await as_gateway(), LEASE)
        told: list[int | None] = []
        election.start(told.append)
        await until(lambda told=told: bool(told))
        (token,) = told
        assert token is not None
        tokens.append(token)
        held = (await server.client.get(LEASES, NAMESPACE, LEASE))["spec"]
        assert held["leaseTransitions"] == terms
        assert held["holderIdentity"]
        await asyncio.to_thread(election.stop)
        given_back = (await server.client.get(LEASES, NAMESPACE, LEASE))["spec"]
        assert not given_back.get("holderIdentity")
    assert tokens[0] < tokens[1]


async def test_scale_is_written_over_what_was_read_only(server: Server, as_gateway: Open) -> None:
    """A number that somebody else has written meanwhile stays."""
    await server.client.create(STATEFUL_SETS, workload.stateful_set(EXPERTS, 1), NAMESPACE)
    target = StatefulSetScale(await as_gateway(), EXPERTS)
    stale = await target.read()
    assert stale.replicas == 1
    await target.write(2, await target.read())
    with pytest.raises(ScaleError, match="somebody else has written it"):
        await target.write(3, stale)
    assert (await target.read()).replicas == 2


async def test_nothing_else_is_allowed(as_gateway: Open) -> None:
    """Neither other objects nor other namespaces."""
    api = await as_gateway()
    statuses = {}
    for method, path in FORBIDDEN:
        body = {} if method in ("PATCH", "PUT") else None
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        with pytest.raises(ClusterError) as refused:
            await api.request(method, path, body=body, content_type=kind)
        statuses[method, path] = refused.value.status
    assert statuses == dict.fromkeys(FORBIDDEN, HTTPStatus.FORBIDDEN)
