"""Watches a container by its probes: when it has started, whether it is ready, whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.kube.kubelet.container import Container
from tests.support.kube.kubelet.probes import Probe
from tests.support.kube.kubelet.status import ContainerState
from tests.support.kube.resources import Json


class Prober:
    """Startup first, then readiness and liveness, as long as the process runs.

    Args:
        manifest: Of the container.
        address: Of its pod.
        process: Is killed if it does not start or does not live.
        state: Is told.
        tell: Is called when that has changed.
    """

    def __init__(
        self,
        manifest: Json,
        address: str,
        process: Container,
        state: ContainerState,
        tell: Callable[[], None],
    ) -> None:
        self._manifest, self._address = manifest, address
        self._process, self._state, self._tell = process, state, tell

    async def run(self) -> None:
        """Until it is cancelled."""
        if startup := self._probe("startupProbe"):
            await self._until_started(startup)
        ready, alive = self._probe("readinessProbe"), self._probe("livenessProbe")
        self._state.has_started, self._state.is_ready = True, ready is None
        self._tell()
        async with asyncio.TaskGroup() as group:
            if ready:
                group.create_task(self._watch_readiness(ready))
            if alive:
                group.create_task(self._watch_liveness(alive))

    def _probe(self, name: str) -> Probe | None:
        manifest = self._manifest.get(name)
        return manifest and Probe(manifest, self._manifest, self._address, self._process.execute)

    async def _until_started(self, probe: Probe) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while not await probe.ask():
            failures += 1
            if failures >= probe.failure_threshold:
                self._process.kill()
            await asyncio.sleep(probe.period_s)

    async def _watch_readiness(self, probe: Probe) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while True:
            failures = 0 if await probe.ask() else failures + 1
            if failures == 0 or failures >= probe.failure_threshold:
                self._state.is_ready = failures == 0
                self._tell()
            await asyncio.sleep(probe.period_s)

    async def _watch_liveness(self, probe: Probe) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period_s)
            failures = 0 if await probe.ask() else failures + 1
        self._process.kill()
