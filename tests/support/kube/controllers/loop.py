"""Runs the controllers beside an API server, whose store they use."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tests.support.kube.controllers import (
    deployments,
    disruption_budgets,
    endpoint_slices,
    root_certificates,
    stateful_sets,
)
from tests.support.kube.store import Store

_LOOK_AGAIN_S = 0.25
"""A pod becomes available as time passes, without any change."""


class Controllers:
    """Work while the context is open.

    Args:
        store: Of the API server.
        max_endpoints: In one EndpointSlice; the real controller takes 100.
    """

    def __init__(self, store: Store, *, max_endpoints: int = 100) -> None:
        self._store = store
        self._max_endpoints = max_endpoints
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="controllers")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        if not self._task.cancel():
            self._task.result()  # what ended it
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            change = self._store.next_change  # before looking, so that none is missed
            root_certificates.reconcile(self._store)
            stateful_sets.reconcile(self._store)
            deployments.reconcile(self._store)
            endpoint_slices.reconcile(self._store, self._max_endpoints)
            disruption_budgets.reconcile(self._store)
            try:
                await asyncio.wait_for(change.wait(), _LOOK_AGAIN_S)
            except TimeoutError:
                continue
