"""API servers that a test runs against: our own, and a real one where its binaries are at hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tests.support.kube.access import Access, token_of
from tests.support.kube.api_server import FakeApiServer, kubeconfig
from tests.support.kube.client import KubeClient
from tests.support.kube.control_plane import TOKEN, ControlPlane
from tests.support.kube.controllers.loop import Controllers
from tests.support.kube.resources import (
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    LEASES,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFUL_SETS,
    Json,
    Resource,
)

NAMESPACE = "default"
_TIMEOUT_S = 30.0
_TOKEN_REQUEST = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
_EMPTIED = (
    STATEFUL_SETS,
    DISRUPTION_BUDGETS,
    CONFIG_MAPS,
    LEASES,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
)


@dataclass(frozen=True)
class Server:
    """A server under test, with its controllers."""

    client: KubeClient
    forget: Callable[[], Awaitable[None]]
    """Has it forget the history of changes."""
    kubeconfig: str
    """Text of a file that leads kubectl to it."""
    kubeconfig_of: Callable[[str], Awaitable[str]]
    """Text of a file for a service account, which may do what its Roles say."""

    async def wait(self, resource: Resource, condition: Callable[[list[Json]], bool]) -> list[Json]:
        """All objects of a kind, once they are so."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                listed = await self.client.list(resource, NAMESPACE)
                if condition(listed["items"]):
                    return listed["items"]
                version = listed["metadata"]["resourceVersion"]
                changes = self.client.watch(
                    resource, NAMESPACE, timeout_s=_TIMEOUT_S, resourceVersion=version
                )
                async with aclosing(changes):
                    await anext(changes)


@asynccontextmanager
async def fake_server() -> AsyncIterator[Server]:
    """Ours."""
    async with (
        FakeApiServer() as api,
        Controllers(api.store),
        KubeClient(api.url) as client,
    ):
        api.faults.append(Access(api.store).check)

        async def forget() -> None:
            api.gone()

        async def kubeconfig_of(account: str) -> str:
            return kubeconfig(api.url, NAMESPACE, token_of(NAMESPACE, account))

        yield Server(client, forget, kubeconfig(api.url, NAMESPACE, ""), kubeconfig_of)


@asynccontextmanager
async def real_server(plane: ControlPlane) -> AsyncIterator[Server]:
    """A real one, of which objects of earlier tests are removed."""
    async with KubeClient(plane.url, TOKEN) as client:
        try:
            restart = partial(asyncio.to_thread, plane.restart_server)

            async def kubeconfig_of(account: str) -> str:
                path = SERVICE_ACCOUNTS.path(NAMESPACE, account) + "/token"
                made = await client.request("POST", path, body=_TOKEN_REQUEST)
                return plane.kubeconfig(made["status"]["token"])

            yield Server(client, restart, plane.kubeconfig(), kubeconfig_of)
        finally:
            for resource in _EMPTIED:
                await client.request("DELETE", resource.path(NAMESPACE))
            await client.request("DELETE", PODS.path(NAMESPACE), body={"gracePeriodSeconds": 0})
            await client.request("DELETE", NODES.path())
            for service in (await client.list(SERVICES, NAMESPACE))["items"]:
                if service["metadata"]["name"] != "kubernetes":
                    await client.delete(SERVICES, NAMESPACE, service["metadata"]["name"])
