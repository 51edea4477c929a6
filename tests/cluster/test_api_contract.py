"""What clients rely on of an API server: the one of the tests keeps it as a real one does.

The same checks run against a real control plane where `ETCD_BIN`, `KUBE_APISERVER_BIN` and
`KUBE_CONTROLLER_MANAGER_BIN` name its binaries.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.servers import NAMESPACE, Server
from tests.support.kube.resources import CONFIG_MAPS, STATEFUL_SETS, ApiError, Json

EVENT_TIMEOUT_S = 20.0


def _config(name: str, **labels: str) -> Json:
    return {"metadata": {"name": name, "labels": labels}, "data": {"a": "1"}}


def _stateful_set() -> Json:
    labels = {"app": "pods"}
    container = {"name": "main", "image": "none"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"serviceName": "pods", "replicas": 0, "selector": {"matchLabels": labels}}
    return {"metadata": {"name": "pods"}, "spec": {**spec, "template": template}}


async def _create(server: Server, name: str = "one", **labels: str) -> Json:
    return await server.client.create(CONFIG_MAPS, _config(name, **labels), NAMESPACE)


async def test_new_objects_get_uid_and_version(server: Server) -> None:
    """Two objects differ in both."""
    first, second = [(await _create(server, name))["metadata"] for name in ("one", "two")]
    assert first["uid"] != second["uid"]
    assert int(first["resourceVersion"]) < int(second["resourceVersion"])


async def test_a_name_is_given_once(server: Server) -> None:
    """The second of the same name is refused."""
    await _create(server)
    with pytest.raises(ApiError, match="already exists") as refused:
        await _create(server)
    assert refused.value.code == 409


async def test_who_writes_must_have_read_the_latest(server: Server) -> None:
    """A stale version is refused; the latest is taken and gets a new one."""
    read = await _create(server)
    written = await server.client.replace(CONFIG_MAPS, {**read, "data": {"a": "2"}})
    assert int(written["metadata"]["resourceVersion"]) > int(read["metadata"]["resourceVersion"])
    with pytest.raises(ApiError, match="has been modified") as refused:
        await server.client.replace(CONFIG_MAPS, {**read, "data": {"a": "3"}})
    assert refused.value.code == 409
    assert (await server.client.get(CONFIG_MAPS, NAMESPACE, "one"))["data"] == {"a": "2"}


async def test_what_is_not_there(server: Server) -> None:
    """404, with the name."""
    with pytest.raises(ApiError, match='"nobody" not found') as refused:
        await server.client.get(CONFIG_MAPS, NAMESPACE, "nobody")
    assert refused.value.code == 404


async def test_lists_take_label_selectors(server: Server) -> None:
    """Equality, inequality and sets."""
    await _create(server, "one", app="a")
    await _create(server, "two", app="b")
    expected = {"app=a": ["one"], "app!=a,app": ["two"], "app in (a, b)": ["one", "two"]}
    for text, names in expected.items():
        listed = await server.client.list(CONFIG_MAPS, NAMESPACE, labelSelector=text)
        assert [item["metadata"]["name"] for item in listed["items"]] == names, text


async def test_watch_of_labels(server: Server) -> None:
    """An object whose label stops matching is deleted for the watch, and added when it matches."""
    item = await _create(server, "one", app="a")
    version = item["metadata"]["resourceVersion"]
    client, seen = server.client, []
    for change in ({"data": {"a": "2"}}, _labelled("b"), _labelled("a")):
        await client.patch(CONFIG_MAPS, NAMESPACE, "one", change)
    await client.delete(CONFIG_MAPS, NAMESPACE, "one")
    watch = client.watch(
        CONFIG_MAPS, NAMESPACE, timeout_s=20, labelSelector="app=a", resourceVersion=version
    )
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        async for kind, _ in watch:
            seen.append(kind)
            if len(seen) == 4:
                break
    assert seen == ["MODIFIED", "DELETED", "ADDED", "DELETED"]


def _labelled(app: str) -> Json:
    return {"metadata": {"labels": {"app": app}}}


async def test_watch_tells_of_what_happens_while_it_is_open(server: Server) -> None:
    """Not only of the past."""
    listed = await server.client.list(CONFIG_MAPS, NAMESPACE)
    version = listed["metadata"]["resourceVersion"]
    watch = server.client.watch(CONFIG_MAPS, NAMESPACE, timeout_s=20, resourceVersion=version)
    first = asyncio.ensure_future(anext(watch))
    await _create(server)
    kind, item = await asyncio.wait_for(first, EVENT_TIMEOUT_S)
    assert (kind, item["metadata"]["name"]) == ("ADDED", "one")


async def test_watch_ends_at_its_timeout_after_a_bookmark(server: Server) -> None:
    """A bookmark has the version to go on from, none before what was told; then the server ends the
    watch. Some servers send none before anything has happened while the watch was open."""
    item = await _create(server, "one", app="a")
    version = item["metadata"]["resourceVersion"]
    await server.client.patch(CONFIG_MAPS, NAMESPACE, "one", {"data": {"a": "2"}})
    watch = server.client.watch(
        CONFIG_MAPS,
        NAMESPACE,
        timeout_s=3,
        labelSelector="app=a",
        resourceVersion=version,
        allowWatchBookmarks="true",
    )
    events: list[tuple[str, Json]] = []
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        async for event in watch:
            events.append(event)
            if len(events) == 1:
                await server.client.patch(CONFIG_MAPS, NAMESPACE, "one", {"data": {"a": "3"}})
    assert {kind for kind, _ in events} == {"MODIFIED", "BOOKMARK"}
    versions = [int(item["metadata"]["resourceVersion"]) for _, item in events]
    assert versions == sorted(versions)


async def test_a_forgotten_version_has_expired(server: Server) -> None:
    """A watch from it is told 410, and to list again."""
    item = await _create(server)
    await _create(server, "two")
    await server.forget()
    watch = server.client.watch(
        CONFIG_MAPS, NAMESPACE, timeout_s=3, resourceVersion=item["metadata"]["resourceVersion"]
    )
    kind, status = await anext(watch)
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


async def test_a_version_that_is_not_there_yet(server: Server) -> None:
    """A list of it fails with 504."""
    with pytest.raises(ApiError, match="Too large resource version") as refused:
        await server.client.list(CONFIG_MAPS, NAMESPACE, resourceVersion="99999999")
    assert refused.value.code == 504


async def test_scale(server: Server) -> None:
    """Reads and writes the replicas of a StatefulSet, which counts it as a new generation."""
    client = server.client
    made = await client.create(STATEFUL_SETS, _stateful_set(), NAMESPACE)
    path = STATEFUL_SETS.path(NAMESPACE, "pods") + "/scale"
    scale = await client.request("GET", path)
    assert (scale["kind"], scale["spec"].get("replicas", 0)) == ("Scale", 0)
    assert scale["status"]["selector"] == "app=pods"
    patched = await client.patch(
        STATEFUL_SETS, NAMESPACE, "pods", {"spec": {"replicas": 3}}, "/scale"
    )
    assert patched["spec"]["replicas"] == 3
    read = await client.get(STATEFUL_SETS, NAMESPACE, "pods")
    assert read["spec"]["replicas"] == 3
    assert read["metadata"]["generation"] == made["metadata"]["generation"] + 1


async def test_generation_counts_changes_of_the_spec_only(server: Server) -> None:
    """Neither labels nor status change it, and who writes the object leaves its status alone."""
    client = server.client
    made = await client.create(STATEFUL_SETS, _stateful_set(), NAMESPACE)
    await client.patch(STATEFUL_SETS, NAMESPACE, "pods", _labelled("x"))
    status = {"status": {"replicas": 7}}
    read = await client.patch(STATEFUL_SETS, NAMESPACE, "pods", status, "/status")
    assert read["metadata"]["generation"] == made["metadata"]["generation"]
    assert read["status"]["replicas"] == 7
    patched = await client.patch(STATEFUL_SETS, NAMESPACE, "pods", {"status": {"replicas": 9}})
    assert patched["status"]["replicas"] != 9
