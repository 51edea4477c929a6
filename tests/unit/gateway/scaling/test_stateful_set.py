"""The number of pods over a socket, as an API server gives and takes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from expertmesh.errors import SettingsError
from expertmesh.scaling_settings import ScalingSettings
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi
from gateway.scaling.scale_target import Scale, ScaleError
from gateway.scaling.stateful_set import StatefulSetScale
from tests.support.kube.api_server import FakeApiServer, Fault
from tests.support.kube.resources import STATEFUL_SETS
from tests.support.kube.store import Key

NAME = "expert-worker"
PATH = f"/apis/apps/v1/namespaces/default/statefulsets/{NAME}/scale"
KEY = Key(STATEFUL_SETS, "default", NAME)


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """With a StatefulSet of three."""
    labels = {"app": NAME}
    async with FakeApiServer() as running:
        running.store.create(
            STATEFUL_SETS,
            {
                "metadata": {"name": NAME},
                "spec": {
                    "replicas": 3,
                    "serviceName": NAME,
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": {"containers": []}},
                },
            },
            "default",
        )
        yield running


@pytest.fixture
async def target(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[StatefulSetScale]:
    """Reaches it by a kubeconfig."""
    access = ClusterAccess(str(server.write_kubeconfig(tmp_path / "config")))
    scale = StatefulSetScale(ClusterApi(access, await access.load()), NAME)
    yield scale
    await scale.close()


def replicas(server: FakeApiServer) -> object:
    """As the StatefulSet has it."""
    return server.store.get(KEY)["spec"]["replicas"]


def answering(status: int) -> Fault:
    """Every request is answered so."""

    async def answer(request: web.Request) -> web.Response:
        body = {"kind": "Status", "message": "no such luck", "code": status}
        return web.json_response(body, status=status)

    return answer


async def test_read_and_write(server: FakeApiServer, target: StatefulSetScale) -> None:
    """One request each, to the subresource alone."""
    seen = await target.read()
    assert seen.replicas == 3
    await target.write(5, seen)
    assert replicas(server) == 5
    assert (await target.read()).replicas == 5
    assert server.requests == [("GET", PATH), ("PATCH", PATH), ("GET", PATH)]


async def test_what_changed_since_is_not_overwritten(
    server: FakeApiServer, target: StatefulSetScale
) -> None:
    """A write from an older version is refused, whoever has written."""
    seen = await target.read()
    await target.write(4, seen)
    with pytest.raises(ScaleError, match="somebody else has written it") as caught:
        await target.write(9, seen)
    assert caught.value.cause == "409"
    assert replicas(server) == 4


@pytest.mark.parametrize(
    ("status", "hint"),
    [(403, "its Role needs get and patch"), (404, "see --scale-target"), (500, "no such luck")],
)
async def test_refusals(
    server: FakeApiServer, target: StatefulSetScale, status: int, hint: str
) -> None:
    """They name what, where and why, and are over once the server is content."""
    server.faults.append(answering(status))
    for request in (target.read(), target.write(5, Scale(3, "1"))):
        with pytest.raises(ScaleError, match=hint) as caught:
            await request
        assert caught.value.cause == str(status)
        assert "statefulset expert-worker in namespace default" in str(caught.value)
    server.faults.clear()
    assert (await target.read()).replicas == 3


async def test_a_server_that_is_gone(server: FakeApiServer, target: StatefulSetScale) -> None:
    """All of that is one cause."""
    with server.outage(), pytest.raises(ScaleError) as caught:
        await target.read()
    assert caught.value.cause == "unreachable"
    assert (await target.read()).replicas == 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"scale_target": "deployment/x"}, "statefulset/expert-worker"),
        ({"scale_target": "statefulset/X_y"}, "statefulset/expert-worker"),
        ({"min_expert_workers": 0}, "min_expert_workers is 0"),
        ({"min_expert_workers": 9}, "max_expert_workers is 8"),
        ({"scale_up_wait_ms": 0.0}, "scale_up_wait_ms is 0"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, object], named: str) -> None:
    """They name the setting and its value."""
    with pytest.raises(SettingsError, match=named):
        ScalingSettings.from_dict(wrong)
