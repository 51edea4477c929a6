"""API servers that a test runs against: our own, and a real one where its binaries are at hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tests.support.kube.api_server import FakeApiServer, kubeconfig
from tests.support.kube.client import KubeClient
from tests.support.kube.control_plane import TOKEN, ControlPlane
from tests.support.kube.controllers.loop import Controllers
from tests.support.kube.resources import (
    CONFIG_MAPS,
    NODES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Json,
    Resource,
)

NAMESPACE = "default"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Server:
    """A server under test, with its controllers."""

    client: KubeClient
    forget: Callable[[], Awaitable[None]]
    """Has it forget the history of changes."""
    kubeconfig: str
    """Text of a file that leads kubectl to it."""

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

        async def forget() -> None:
            api.gone()

        yield Server(client, forget, kubeconfig(api.url, NAMESPACE, ""))


@asynccontextmanager
async def real_server(plane: ControlPlane) -> AsyncIterator[Server]:
    """A real one, of which objects of earlier tests are removed."""
    async with KubeClient(plane.url, TOKEN) as client:
        try:
            restart = partial(asyncio.to_thread, plane.restart_server)
            yield Server(client, restart, plane.kubeconfig)
        finally:
            for resource in (STATEFUL_SETS, CONFIG_MAPS):
                await client.request("DELETE", resource.path(NAMESPACE))
            await client.request("DELETE", PODS.path(NAMESPACE), body={"gracePeriodSeconds": 0})
            await client.request("DELETE", NODES.path())
            for service in (await client.list(SERVICES, NAMESPACE))["items"]:
                if service["metadata"]["name"] != "kubernetes":
                    await client.delete(SERVICES, NAMESPACE, service["metadata"]["name"])
