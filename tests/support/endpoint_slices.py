"""EndpointSlices as a controller writes them, and discovery that follows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from expertmesh.expert_source import KubernetesService
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi
from gateway.mesh.discovery import Endpoints
from gateway.mesh.service_discovery import ServiceDiscovery, WatchTimes
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import ENDPOINT_SLICES, Json
from tests.support.kube.store import Key

SERVICE, NAMESPACE, PORT = "expert-worker", "mesh", 50061
WAIT_S = 20.0
TIMES = WatchTimes(list_s=10.0, watch_s=1, slack_s=5.0, first_pause_s=0.02, longest_pause_s=0.1)
"""A watch is over after a second; nothing is given up because the machine is busy."""


def pod(number: int, state: str = "up", *, host: str | None = None, node: str = "") -> Json:
    """An entry of a slice: a pod that is up, draining, down, or evicted and without address."""
    conditions = {
        "up": {"ready": True, "serving": True, "terminating": False},
        "draining": {"ready": False, "serving": True, "terminating": True},
        "down": {"ready": False, "serving": False, "terminating": False},
        "evicted": {"ready": False, "serving": False, "terminating": False},
    }[state]
    return {
        "addresses": [] if state == "evicted" else [host or f"127.77.0.{number}"],
        "conditions": conditions,
        "nodeName": node,
        "targetRef": {"kind": "Pod", "name": f"pod-{number}", "uid": f"uid-{number}"},
    }


def endpoint_slice(name: str, *pods: Json, port_name: str = "grpc") -> Json:
    """One slice of the Service."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": list(pods) or None,
        "ports": [{"name": port_name, "port": PORT, "protocol": "TCP"}],
    }


class Slices:
    """The slices of the Service in an API server."""

    def __init__(self, server: FakeApiServer) -> None:
        self._store = server.store

    def put(self, name: str, *pods: Json) -> None:
        """Adds or replaces a slice."""
        if any(item["metadata"]["name"] == name for item in self._all()):
            self._store.update(self._key(name), lambda old: {**old, "endpoints": list(pods)})
        else:
            self._store.create(ENDPOINT_SLICES, endpoint_slice(name, *pods), NAMESPACE)

    def delete(self, name: str) -> None:
        """Removes a slice."""
        self._store.delete(self._key(name))

    def _all(self) -> list[Json]:
        return self._store.list(ENDPOINT_SLICES, NAMESPACE)

    def _key(self, name: str) -> Key:
        return Key(ENDPOINT_SLICES, NAMESPACE, name)


class Followed:
    """A discovery, what it told, and what it asked."""

    def __init__(self, server: FakeApiServer, discovery: ServiceDiscovery) -> None:
        self.server = server
        self.slices = Slices(server)
        self.discovery = discovery
        self.heard: list[Endpoints] = []
        self.lists: list[dict[str, str]] = []
        """Queries of the LISTs that were begun."""
        self.watches: list[dict[str, str]] = []
        """Those of the watches."""
        server.faults.insert(0, self._note)

    @property
    def hosts(self) -> list[str]:
        """Last numbers of the addresses that were told last; those that leave have a sign."""
        return [
            endpoint.address.removeprefix("127.77.0.").removesuffix(f":{PORT}")
            + "-" * endpoint.leaving
            for endpoint in (self.heard[-1] if self.heard else ())
        ]

    async def until_hosts(self, *hosts: str) -> None:
        """Waits for a view."""
        await until(lambda: self.hosts == list(hosts), lambda: f"still {self.hosts}")

    async def until_watched(self, times: int = 1) -> None:
        """Until so many watches have been begun."""
        await until(lambda: len(self.watches) >= times, lambda: "no further watch")

    async def _note(self, request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/endpointslices"):
            (self.watches if "watch" in request.query else self.lists).append(dict(request.query))
        return None


async def until(condition: Callable[[], bool], message: Callable[[], str] = lambda: "") -> None:
    """Waits for it, and lets servers of this loop work meanwhile."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, message()
        await asyncio.sleep(0.005)


async def open_api(server: FakeApiServer, folder: Path, namespace: str = NAMESPACE) -> ClusterApi:
    """A client of a server."""
    path = server.write_kubeconfig(folder / "kubeconfig", namespace)
    return await asyncio.to_thread(ClusterApi.open, ClusterAccess(str(path)))


@asynccontextmanager
async def following(
    server: FakeApiServer, folder: Path, times: WatchTimes = TIMES
) -> AsyncIterator[Followed]:
    """A discovery of the Service that runs."""
    discovery = ServiceDiscovery(await open_api(server, folder), KubernetesService(SERVICE), times)
    followed = Followed(server, discovery)
    discovery.start(followed.heard.append)
    try:
        yield followed
    finally:
        await asyncio.to_thread(discovery.stop)
