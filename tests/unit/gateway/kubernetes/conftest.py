"""An API server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.endpoint_slices import NAMESPACE
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import NAMESPACES
from tests.support.leaks import LeakGuard


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """With the gateways' namespace; no thread of a client is left at the end."""
    guard = LeakGuard()
    async with FakeApiServer() as server:
        server.store.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        yield server
    assert guard.remaining(grace_s=5.0) == []
