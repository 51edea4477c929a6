"""Runs the pods of an API as processes of this machine, each at a loopback address of its own.

It is scheduler and kubelet of all nodes. Like a real one it asks the API and nobody else, and goes
on with what it has while the API is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import psutil

from tests.support.kube.client import KubeClient
from tests.support.kube.kubelet.container import Lifeline
from tests.support.kube.kubelet.pod import PodRunner
from tests.support.kube.resources import NODES, PODS, ApiError, Json
from tests.support.processes import processes_of

_WATCH_S = 30.0
_TRY_AGAIN_S = 0.2


class Kubelet:
    """Works while the context is open; then all its processes are gone.

    Args:
        url: Of the API server.
        folder: For files and logs of pods.
        nodes: Pods are spread over them.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        nodes: Sequence[str] = ("node-a", "node-b", "node-c"),
    ) -> None:
        self._client = KubeClient(url)
        self._folder = folder
        self._nodes = list(nodes)
        # Of another process than this, tests may run beside these.
        self._network = f"127.77.{os.getpid() % 250}"
        self._addresses = itertools.count(1)
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._lifeline = Lifeline(-1, "")
        self._lifeline_write = -1

    async def __aenter__(self) -> Self:
        read_fd, self._lifeline_write = os.pipe()
        self._lifeline = Lifeline(read_fd, uuid.uuid4().hex)
        await self._client.__aenter__()
        for name in self._nodes:
            await self._client.create(NODES, {"metadata": {"name": name}, "spec": {}})
        self._loop = asyncio.create_task(self._run(), name="kubelet")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = [*self._tasks.values(), *([self._loop] if self._loop else [])]
        for task in tasks:
            task.cancel()
        for process in processes_of(self._lifeline.marker):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for runner in self._runners.values():
            await runner.reap()
        await self._client.__aexit__(kind, error, trace)
        for descriptor in (self._lifeline.read_fd, self._lifeline_write):
            os.close(descriptor)
        faults = [each for each in ended if isinstance(each, Exception)]
        if faults:
            raise ExceptionGroup("the kubelet has failed", faults)

    def runner(self, name: str) -> PodRunner:
        """Of the pod with this name that came last."""
        return next(each for each in reversed(self._runners.values()) if each.name == name)

    def logs(self) -> str:
        """What all containers have said last, for a message of failure."""
        parts = []
        for path in sorted(self._folder.glob("*/*.log")):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            parts.append(f"--- {path.parent.name}/{path.name} ---\n" + "\n".join(lines))
        return "\n".join(parts)

    async def _run(self) -> None:
        """LIST is the truth, and a watch says when to look again."""
        while True:
            try:
                listed = await self._client.list(PODS)
                for uid in self._runners.keys() - {
                    each["metadata"]["uid"] for each in listed["items"]
                }:
                    self._runners[uid].kill()
                    self._runners[uid].end(0.0)
                for pod in listed["items"]:
                    await self._look_at(pod)
                version = listed["metadata"]["resourceVersion"]
                watch = self._client.watch(PODS, timeout_s=_WATCH_S, resourceVersion=version)
                async for kind, pod in watch:
                    if kind == "ERROR":
                        break
                    if kind == "DELETED":
                        self._gone(pod)
                    else:
                        await self._look_at(pod)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _look_at(self, pod: Json) -> None:
        """Binds, starts or ends a pod."""
        metadata = pod["metadata"]
        runner = self._runners.get(metadata["uid"])
        if "nodeName" not in pod["spec"]:
            await self._bind(pod)
        elif runner is None:
            self._start(pod)
        elif "deletionTimestamp" in metadata:
            runner.end(metadata["deletionGracePeriodSeconds"])

    async def _bind(self, pod: Json) -> None:
        """To the node with the fewest pods that takes more."""
        metadata = pod["metadata"]
        nodes = (await self._client.list(NODES))["items"]
        free = [node["metadata"]["name"] for node in nodes if not node["spec"].get("unschedulable")]
        if not free:
            return
        bound = [each["spec"].get("nodeName") for each in (await self._client.list(PODS))["items"]]
        node = min(free, key=bound.count)
        path = PODS.path(metadata["namespace"], metadata["name"]) + "/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
        }
        await self._client.request("POST", path, body={**body, "target": target})

    def _start(self, pod: Json) -> None:
        metadata = pod["metadata"]
        number = next(self._addresses)
        runner = PodRunner(
            self._client,
            pod,
            f"{self._network}.{number}",
            self._folder / f"{metadata['name']}-{number}",
            self._folder / "claims",
            self._lifeline,
        )
        self._runners[metadata["uid"]] = runner
        if "deletionTimestamp" in metadata:
            runner.end(metadata["deletionGracePeriodSeconds"])
        task = asyncio.create_task(runner.run(), name=f"pod {metadata['name']}")
        self._tasks[metadata["uid"]] = task

    def _gone(self, pod: Json) -> None:
        """Deleted without asking us: its processes must not go on."""
        if runner := self._runners.get(pod["metadata"]["uid"]):
            runner.kill()
            runner.end(0.0)
