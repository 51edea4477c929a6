"""An API server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.endpoint_slices import NAMESPACE
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import NAMESPACES


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """With the gateways' namespace."""
    async with FakeApiServer() as server:
        server.store.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        yield server
