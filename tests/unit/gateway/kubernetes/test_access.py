"""How a gateway gets at the API server, and what it says if it does not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web

from expertmesh.errors import StartupError
from expertmesh.settings import MeshOptions
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi, ClusterError
from gateway.mesh.discovery_setup import make_discovery
from gateway.placement.setup import make_election
from tests.support.endpoint_slices import open_api
from tests.support.kube.api_server import FakeApiServer


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; whoever does not ask for Kubernetes does not need it."""
    monkeypatch.setitem(sys.modules, "kubernetes.aio.config", None)
    make_discovery(MeshOptions(experts="a:1"))
    make_discovery(MeshOptions(experts="dns:a:1"))
    with pytest.raises(StartupError, match=r"the client of Kubernetes is not installed") as caught:
        make_discovery(MeshOptions(experts="k8s:experts"))
    assert caught.value.fix == "pip install 'expertmesh[k8s]'"


def test_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file there is nothing to go by."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupError, match="no access to Kubernetes: Service host/port") as caught:
        make_election(MeshOptions(leader_lock="lease:experts"))
    assert "--kubeconfig" in caught.value.fix


@pytest.mark.parametrize("text", [None, "", "[]", "a: 1", "contexts: [{}]", "{", "\x00"])
def test_a_file_that_is_none(tmp_path: Path, text: str | None) -> None:
    """Its path is named."""
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError, match=f"kubeconfig {path} cannot be used: "):
        ClusterApi.open(ClusterAccess.of(MeshOptions(kubeconfig=str(path))))


async def test_credentials_are_read_again(server: FakeApiServer, tmp_path: Path) -> None:
    """Once they are refused; the token of the file is then another one."""
    tokens: list[str] = []

    async def check(request: web.Request) -> web.StreamResponse | None:
        tokens.append(request.headers.get("Authorization", ""))
        return None if tokens[-1] == "Bearer second" else web.Response(status=401)

    server.faults.append(check)
    api = await open_api(server, tmp_path)
    path = tmp_path / "kubeconfig"
    path.write_text(path.read_text().replace("user: {}", "user: {token: second}"))
    with pytest.raises(ClusterError, match="answers 401"):
        await api.request("GET", "/api/v1/namespaces")
    answer = await api.request("GET", "/api/v1/namespaces")
    assert answer["kind"] == "NamespaceList"
    assert tokens == ["", "Bearer second"]
    await api.close()


async def test_a_namespace_is_that_of_the_file(server: FakeApiServer, tmp_path: Path) -> None:
    """Or `default`."""
    for given, expected in (("mesh", "mesh"), ("", "default")):
        api = await open_api(server, tmp_path, given)
        assert api.namespace == expected
        await asyncio.wait_for(api.close(), 5)
