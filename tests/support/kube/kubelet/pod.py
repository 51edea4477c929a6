"""One pod on a kubelet of the tests: from its start over restarts to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp

from tests.support.kube.client import KubeClient
from tests.support.kube.kubelet.container import Container, Lifeline
from tests.support.kube.kubelet.environment import Sandbox, command_of, variables_of
from tests.support.kube.kubelet.prober import Prober
from tests.support.kube.kubelet.status import ContainerState, PodState
from tests.support.kube.kubelet.volumes import folders_of, make_volumes
from tests.support.kube.resources import PODS, ApiError, Json
from tests.support.kube.store import now

_T = TypeVar("_T")

_TRY_AGAIN_S = 0.2
_RESTART_S = 10.0
"""Before the second restart and all later ones; between attempts of an init container."""


class PodRunner:
    """Runs one pod; `run` returns when it is gone from the API.

    Args:
        client: Of the API.
        pod: As it was bound.
        address: Of the pod.
        folder: For its files and logs.
        claims: For volumes that outlive it.
        lifeline: Ends its processes when the tests have ended.
    """

    def __init__(
        self,
        client: KubeClient,
        pod: Json,
        address: str,
        folder: Path,
        claims: Path,
        lifeline: Lifeline,
    ) -> None:
        self._client, self._pod, self._address = client, pod, address
        self._folder, self._claims, self._lifeline = folder, claims, lifeline
        self._ending = asyncio.Event()
        self._news = asyncio.Event()
        self._volumes: dict[str, Path] = {}
        self._state = PodState(pod, address)
        self._running: dict[str, Container] = {}
        self._grace_s = 0.0

    @property
    def name(self) -> str:
        """Of the pod."""
        return str(self._pod["metadata"]["name"])

    def log(self, container: str) -> Path:
        """The file that its output goes to."""
        return self._folder / f"{container}.log"

    def container(self, name: str) -> Container:
        """One that runs."""
        return self._running[name]

    def end(self, grace_s: float) -> None:
        """Has it end within so many seconds."""
        self._grace_s = grace_s
        self._ending.set()

    def kill(self) -> None:
        """Ends its processes at once."""
        for container in list(self._running.values()):
            container.kill()

    async def reap(self) -> None:
        """Waits for the end of processes that were killed."""
        for container in list(self._running.values()):
            await container.wait()

    async def run(self) -> None:
        """The life of the pod."""
        self._folder.mkdir(parents=True)
        async with asyncio.TaskGroup() as group:
            reporter = group.create_task(self._report())
            self._news.set()
            lives = [group.create_task(self._initialize())]
            await asyncio.wait(
                [lives[0], ending := group.create_task(self._ending.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not self._ending.is_set():
                lives += [
                    group.create_task(self._live(container, state))
                    for container, state in zip(
                        self._pod["spec"]["containers"],
                        self._state.containers,
                        strict=True,
                    )
                ]
            await ending
            await self._stop(lives)
            reporter.cancel()
        await self._forget()

    # --- containers ---

    async def _initialize(self) -> None:
        """Volumes, and init containers one after the other; each again until it ends well."""
        pod, spec = self._pod, self._pod["spec"]
        self._volumes = await self._until_done(
            lambda: make_volumes(self._client, pod, self._address, self._folder, self._claims)
        )
        for container in spec.get("initContainers", []):
            await self._run_to_success(container)
        self._state.is_initialized = True

    async def _run_to_success(self, container: Json) -> None:
        for pause_s in itertools.chain([0.0], itertools.repeat(_RESTART_S)):
            await asyncio.sleep(pause_s)
            process = await self._start(container)
            if await process.wait() == 0:
                return

    async def _start(self, container: Json) -> Container:
        variables = await self._until_done(
            lambda: variables_of(self._client, self._pod, container, self._address)
        )
        sandbox = Sandbox(self._address, folders_of(container, self._volumes))
        command = command_of(container, variables)
        process = Container(
            [sandbox.translate(part) for part in command],
            {name: sandbox.translate(value) for name, value in variables.items()},
            self.log(container["name"]),
            self._folder,
            self._lifeline,
        )
        await process.start()
        self._running[container["name"]] = process
        return process

    async def _live(self, container: Json, state: ContainerState) -> None:
        """Starts a container, probes it, and starts it again when it has ended."""
        while not self._ending.is_set():
            process = await self._start(container)
            state.is_running, state.exit_code, state.since = True, None, now()
            self._news.set()
            prober = Prober(container, self._address, process, state, self._news.set)
            probing = asyncio.create_task(prober.run())
            try:
                state.exit_code = await process.wait()
            finally:
                probing.cancel()
            state.is_running = state.is_ready = state.has_started = False
            state.since = now()
            self._news.set()
            if self._ending.is_set():
                return
            state.num_restarts += 1
            if state.num_restarts > 1:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _RESTART_S)

    # --- the end ---

    async def _stop(self, lives: list[asyncio.Task[None]]) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over."""
        deadline = time.monotonic() + self._grace_s
        if not self._state.is_initialized:
            self.kill()
            for life in lives:
                life.cancel()
        else:
            hooks = [
                self._stop_one(container, deadline) for container in self._pod["spec"]["containers"]
            ]
            await asyncio.gather(*hooks)
        await asyncio.wait(lives)

    async def _stop_one(self, container: Json, deadline: float) -> None:
        process = self._running.get(container["name"])
        if process is None:
            return
        hook = container.get("lifecycle", {}).get("preStop", {})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._run_hook(hook, process, deadline)
                process.terminate()
                await process.wait()
                return
        process.kill()

    async def _run_hook(self, hook: Json, process: Container, deadline: float) -> None:
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        elif "exec" in hook:
            # Variables are not expanded here: the real one does not either.
            await process.execute(hook["exec"]["command"], deadline - time.monotonic())
        else:
            assert not hook, f"preStop {hook} is not known"

    async def _forget(self) -> None:
        """Removes the pod from the API."""
        metadata = self._pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}

        async def delete() -> None:
            try:
                await self._client.delete(PODS, metadata["namespace"], metadata["name"], options)
            except ApiError as error:
                if error.code not in (404, 409):
                    raise

        await self._until_done(delete)

    # --- status ---

    async def _report(self) -> None:
        """Writes the latest status, again and again while the API is away."""
        metadata = self._pod["metadata"]
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                status = {
                    "metadata": {"uid": metadata["uid"]},
                    "status": self._state.report(),
                }
                await self._client.patch(
                    PODS, metadata["namespace"], metadata["name"], status, "/status"
                )
            except ApiError as error:
                if error.code in (404, 409):
                    return
                await self._later()
            except (aiohttp.ClientError, TimeoutError, OSError):
                await self._later()

    async def _later(self) -> None:
        await asyncio.sleep(_TRY_AGAIN_S)
        self._news.set()

    async def _until_done(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """What `attempt` returns, once the API is there and has what it asks for."""
        while True:
            try:
                return await attempt()
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(_TRY_AGAIN_S)
