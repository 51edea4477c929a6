"""One pod on a kubelet of the tests: from its start over restarts to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp

from tests.support.kube.client import KubeClient
from tests.support.kube.kubelet.container import Container, Lifeline
from tests.support.kube.kubelet.environment import Sandbox, command_of, variables_of
from tests.support.kube.kubelet.images import entrypoint_of
from tests.support.kube.kubelet.probes import Probe
from tests.support.kube.kubelet.volumes import folders_of, make_volumes
from tests.support.kube.resources import PODS, ApiError, Json
from tests.support.kube.store import now

_T = TypeVar("_T")

_TRY_AGAIN_S = 0.2
_RESTART_S = 10.0
"""Before the second restart and all later ones; between attempts of an init container."""


@dataclass
class _State:
    """Of one container."""

    name: str
    image: str
    is_running: bool = False
    has_started: bool = False
    is_ready: bool = False
    exit_code: int | None = None
    num_restarts: int = 0
    since: str = field(default_factory=now)

    def report(self) -> Json:
        """As the status of a pod has it."""
        state: Json = {"waiting": {"reason": "ContainerCreating"}}
        if self.is_running:
            state = {"running": {"startedAt": self.since}}
        elif self.exit_code is not None:
            state = {"terminated": {"exitCode": self.exit_code, "finishedAt": self.since}}
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "ready": self.is_ready,
            "started": self.has_started,
            "restartCount": self.num_restarts,
            "state": state,
        }


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
        self._states = [
            _State(each["name"], each.get("image", "")) for each in pod["spec"]["containers"]
        ]
        self._is_initialized = False
        self._ready_since = ("False", now())
        self._running: dict[str, Container] = {}
        self._grace_s = 0.0

    @property
    def uid(self) -> str:
        """Of the pod."""
        return str(self._pod["metadata"]["uid"])

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
            self._tell()
            lives = [group.create_task(self._initialize())]
            await asyncio.wait(
                [lives[0], ending := group.create_task(self._ending.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not self._ending.is_set():
                lives += [
                    group.create_task(self._live(container, state))
                    for container, state in zip(
                        self._pod["spec"]["containers"], self._states, strict=True
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
        self._is_initialized = True

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
        command = command_of(container, entrypoint_of(container.get("image", "")), variables)
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

    async def _live(self, container: Json, state: _State) -> None:
        """Starts a container, probes it, and starts it again when it has ended."""
        while not self._ending.is_set():
            process = await self._start(container)
            state.is_running, state.exit_code, state.since = True, None, now()
            self._tell()
            probing = asyncio.create_task(self._probe(container, state, process))
            try:
                state.exit_code = await process.wait()
            finally:
                probing.cancel()
            state.is_running = state.is_ready = state.has_started = False
            state.since = now()
            self._tell()
            if self._ending.is_set():
                return
            state.num_restarts += 1
            if state.num_restarts > 1:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _RESTART_S)

    async def _probe(self, container: Json, state: _State, process: Container) -> None:
        """Startup first, then readiness and liveness."""

        def probe(name: str) -> Probe | None:
            manifest = container.get(name)
            return manifest and Probe(manifest, container, self._address, process.execute)

        if startup := probe("startupProbe"):
            await self._until_started(startup, process)
        state.has_started = True
        ready, alive = probe("readinessProbe"), probe("livenessProbe")
        state.is_ready = ready is None
        self._tell()
        async with asyncio.TaskGroup() as group:
            if ready:
                group.create_task(self._watch_readiness(ready, state))
            if alive:
                group.create_task(self._watch_liveness(alive, process))

    async def _until_started(self, probe: Probe, process: Container) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while not await probe.ask():
            failures += 1
            if failures >= probe.failure_threshold:
                process.kill()
            await asyncio.sleep(probe.period_s)

    async def _watch_readiness(self, probe: Probe, state: _State) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while True:
            failures = 0 if await probe.ask() else failures + 1
            if failures == 0 or failures >= probe.failure_threshold:
                state.is_ready = failures == 0
                self._tell()
            await asyncio.sleep(probe.period_s)

    async def _watch_liveness(self, probe: Probe, process: Container) -> None:
        failures = 0
        await asyncio.sleep(probe.delay_s)
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period_s)
            failures = 0 if await probe.ask() else failures + 1
        process.kill()

    # --- the end ---

    async def _stop(self, lives: list[asyncio.Task[None]]) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over."""
        deadline = time.monotonic() + self._grace_s
        if not self._is_initialized:
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

    def _tell(self) -> None:
        is_ready = self._is_initialized and all(state.is_ready for state in self._states)
        if self._ready_since[0] != str(is_ready):
            self._ready_since = (str(is_ready), now())
        self._news.set()

    async def _report(self) -> None:
        """Writes the latest status, again and again while the API is away."""
        metadata = self._pod["metadata"]
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                status = {"metadata": {"uid": metadata["uid"]}, "status": self._status()}
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

    def _status(self) -> Json:
        is_ready, since = self._ready_since
        is_running = any(state.is_running or state.exit_code is not None for state in self._states)
        conditions = {
            "PodScheduled": "True",
            "Initialized": str(self._is_initialized),
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        return {
            "phase": "Running" if is_running else "Pending",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "hostIP": "127.0.0.1",
            "conditions": [
                {"type": name, "status": status, "lastTransitionTime": since}
                for name, status in conditions.items()
            ],
            "containerStatuses": [state.report() for state in self._states],
        }

    async def _until_done(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """What `attempt` returns, once the API is there and has what it asks for."""
        while True:
            try:
                return await attempt()
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(_TRY_AGAIN_S)
