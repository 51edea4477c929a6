"""What is in deploy/, as a real API server takes it; only where the binaries of one are named.

Nothing is made but the namespace and the priority class, which the rest needs: requests are dry
runs, with defaults, validation and admission. Kinds of other projects are left out.
"""

from __future__ import annotations

import copy
from pathlib import Path

from tests.support.kube.client import KubeClient
from tests.support.kube.control_plane import TOKEN, ControlPlane
from tests.support.kube.resources import RESOURCES, ApiError, Json
from tests.support.manifests import VARIANTS, Manifests, labels_of, parse, pod_of, render_all

OLDEST_MINOR = 30
"""Of Kubernetes 1: what an older server does not know is said to it in other words."""
_BY_KIND = {(each.api_version, each.kind): each for each in RESOURCES}
_NEEDED = {"Namespace", "PriorityClass"}


async def test_all_is_taken(real_plane: ControlPlane, tmp_path: Path) -> None:
    """Every object of every variant, and the pods that its workloads would make."""
    async with KubeClient(real_plane.url, TOKEN) as client:
        _, minor, _ = (await client.request("GET", "/version"))["gitVersion"].split(".", 2)
        for name, text in render_all(tmp_path, VARIANTS):
            found = Manifests(name, parse(text))
            if int(minor) < OLDEST_MINOR:
                _say_in_older_words(found)
            namespace = found.of("Namespace")[0]["metadata"]["name"]
            refused = [await _refusal(client, item) for item in found.objects]
            refused += [await _refusal(client, _pod(work, namespace)) for work in found.workloads]
            assert [each for each in refused if each] == [], name


async def test_a_mistake_is_refused(real_plane: ControlPlane, tmp_path: Path) -> None:
    """One that schemas do not see."""
    ((_, text),) = render_all(tmp_path, ["local-cpu"])
    found = Manifests("broken", parse(text))
    _say_in_older_words(found)
    found.container("gateway")["ports"][0]["containerPort"] = 70000
    async with KubeClient(real_plane.url, TOKEN) as client:
        await _refusal(client, found.of("Namespace")[0])
        assert "containerPort" in await _refusal(client, found.gateway)


async def _refusal(client: KubeClient, item: Json) -> str:
    """Why the server does not take an object; empty if it does, or does not know its kind."""
    resource = _BY_KIND.get((item["apiVersion"], item["kind"]))
    if resource is None:
        return ""
    is_needed = item["kind"] in _NEEDED
    query = {} if is_needed else {"dryRun": "All", "fieldValidation": "Strict"}
    path = resource.path(item["metadata"].get("namespace", ""))
    try:
        await client.request("POST", path, body=item, query=query)
    except ApiError as error:
        return "" if is_needed and error.code == 409 else f"{item['kind']}: {error}"
    return ""


def _pod(workload: Json, namespace: str) -> Json:
    """As a controller makes it of a template, which servers do not look at as closely."""
    metadata = {"name": "one", "namespace": namespace, "labels": labels_of(workload)}
    spec = copy.deepcopy(pod_of(workload))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _say_in_older_words(found: Manifests) -> None:
    """Probes of gRPC and hooks that sleep, without which there is no handler at all."""
    for container in found.containers():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if grpc := container[probe].pop("grpc", None):
                container[probe]["tcpSocket"] = {"port": grpc["port"]}
        hook = container["lifecycle"]["preStop"]
        if sleep := hook.pop("sleep", None):
            hook["exec"] = {"command": ["sleep", str(sleep["seconds"])]}
