"""Who may look after expert workers, and what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest

from gateway.admin_handlers import AdminAccess
from gateway.api_keys import ApiKeys
from gateway.app import Access
from gateway.placement.operator import PlacementRefusedError, UnknownWorkerError
from gateway.placement.report import PlacementReport
from gateway.placement.state import PlacementPolicy
from tests.support.placements import some_experts, some_workers
from tests.support.scripted_engine import scripted_gateway

ADMIN, USER = "key-of-an-admin", "key-of-a-user"
PRIVATE = AdminAccess(is_private=True)
GUARDED = AdminAccess(ApiKeys.of([ADMIN]))
PATHS = [
    ("GET", "/admin/placement"),
    ("POST", "/admin/placement/rebalance"),
    ("POST", "/admin/workers/w0/drain"),
    ("GET", "/admin/unknown"),
]


class Told:
    """An operator that remembers, and knows expert worker w0 alone."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.num_rebalanced = 0
        self.leads = True

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""

    def report(self) -> PlacementReport:
        """Two empty expert workers."""
        return PlacementReport(some_experts(), PlacementPolicy(), 7, tuple(some_workers(2, 4)))

    def rebalance(self) -> None:
        """Remembers it."""
        if not self.leads:
            raise PlacementRefusedError("another gateway leads")
        self.num_rebalanced += 1

    def drain(self, worker_id: str) -> None:
        """Remembers it."""
        if worker_id != "w0":
            raise UnknownWorkerError(worker_id, ["w0"])
        self.drained.append(worker_id)


@contextlib.asynccontextmanager
async def _served(told: Told, admin: AdminAccess, keys: Sequence[str] = ()) -> AsyncIterator[str]:
    access = Access(ApiKeys.of(keys), admin)
    async with scripted_gateway(access=access, operator=told) as running:
        yield running.url


async def _call(
    session: aiohttp.ClientSession, method: str, url: str, key: str = "", **headers: str
) -> tuple[int, dict[str, object]]:
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with session.request(method, url, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_users_are_no_operators(
    session: aiohttp.ClientSession, method: str, path: str
) -> None:
    """An API key opens nothing, nor does no key where others need one, nor a page in a browser."""
    told = Told()
    cases = [
        (GUARDED, (), "", {}),
        (GUARDED, (), "wrong-key", {}),
        (GUARDED, (USER,), USER, {}),
        (AdminAccess(), (USER,), USER, {}),
        (AdminAccess(), (), "", {}),
        (PRIVATE, (), "", {"Origin": "http://evil.example"}),
    ]
    for admin, keys, key, headers in cases:
        async with _served(told, admin, keys) as url:
            status, body = await _call(session, method, url + path, key, **headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (admin, key)
    assert (told.drained, told.num_rebalanced) == ([], 0)


@pytest.mark.parametrize(("admin", "key"), [(GUARDED, ADMIN), (PRIVATE, "")])
async def test_operators(session: aiohttp.ClientSession, admin: AdminAccess, key: str) -> None:
    """With an admin key, or on a machine of one's own."""
    told = Told()
    async with _served(told, admin) as url:
        status, report = await _call(session, "GET", f"{url}/admin/placement", key)
        assert (status, report["leader"], report["token"], report["num_experts"]) == (
            200, True, 7, 16,
        )  # fmt: skip
        assert [worker["worker_id"] for worker in report["workers"]] == ["w0", "w1"]
        for path in ("placement/rebalance", "workers/w0/drain"):
            assert (await _call(session, "POST", f"{url}/admin/{path}", key))[0] == 202
        status, body = await _call(session, "POST", f"{url}/admin/workers/w9/drain", key)
        assert (status, body["error"]["code"]) == (404, "worker_not_found")
        assert body["error"]["message"] == "there is no expert worker w9; there are w0"
        told.leads = False
        status, body = await _call(session, "POST", f"{url}/admin/placement/rebalance", key)
        assert (status, body["error"]["code"]) == (409, "placement_refused")
    assert (told.drained, told.num_rebalanced) == (["w0"], 1)


async def test_a_static_placement_is_not_moved(session: aiohttp.ClientSession) -> None:
    """It is said so."""
    async with scripted_gateway(access=Access(admin=PRIVATE)) as running:
        status, body = await _call(session, "POST", f"{running.url}/admin/placement/rebalance")
        assert status == 409
        assert "static" in str(body)
        status, report = await _call(session, "GET", f"{running.url}/admin/placement")
        assert (status, report["leader"], report["plan"]) == (200, False, None)
