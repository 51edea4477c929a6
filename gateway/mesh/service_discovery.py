"""Discovery of the pods behind a Service of Kubernetes.

LIST is the truth and a watch only makes it quicker: each watch is short, and whatever ends it, in
time or not, the next thing is another LIST. So an event that was missed, a connection that was cut
off unnoticed or a version that the server does not know (any more) costs one round, and while the
API server is away, the last view stays. See ADR 0018.

Thread: `discovery`, with an event loop, owns everything here. Others read the report.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from expertmesh.expert_source import KubernetesService
from gateway.cluster.api import ClusterApi, ClusterError, refusal_in
from gateway.cluster.backoff import Backoff
from gateway.cluster.fields import JsonObject, at, list_at, text_at
from gateway.cluster.loop_thread import LoopThread
from gateway.mesh.discovery import DiscoveryReport, Endpoints, OnEndpoints
from gateway.mesh.endpoint_slices import ServiceView, read_slices

logger = logging.getLogger("gateway.discovery")

_JOIN_S = 2.0


@dataclass(frozen=True)
class WatchTimes:
    """How long things may take, in seconds."""

    list_s: float = 10.0
    """Until the answer to a LIST is there."""
    watch_s: int = 60
    """Until the server is to end a watch; a random part of it is taken off."""
    slack_s: float = 5.0
    """Beyond that, until a watch counts as cut off."""
    first_pause_s: float = 0.2
    """After a round; it doubles after each that was shorter than the longest pause."""
    longest_pause_s: float = 10.0


class ServiceDiscovery:
    """Follows the EndpointSlices of one Service.

    Args:
        api: Of the cluster; closed at the end.
        service: Whose pods.
        times: Limits.
    """

    def __init__(
        self, api: ClusterApi, service: KubernetesService, times: WatchTimes = WatchTimes()
    ) -> None:
        self._api = api
        self._service = service
        self._times = times
        self._name = f"{service.namespace or api.namespace}/{service.service}"
        namespace = service.namespace or api.namespace
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service.service}"}
        self._backoff = Backoff(times.first_pause_s, times.longest_pause_s)
        self._slices: dict[str, JsonObject] = {}
        self._told: Endpoints | None = None
        self._on_change: OnEndpoints = lambda endpoints: None
        self._certain_s: float | None = None
        self._report = DiscoveryReport(problem=f"Service {self._name}: not asked for yet")
        self._thread = LoopThread("discovery", self._run)

    def start(self, on_change: OnEndpoints) -> None:
        """Begins; nothing is told before the API server has answered."""
        self._on_change = on_change
        self._thread.start()

    def stop(self) -> None:
        """Ends; the thread is gone when this returns."""
        self._thread.stop(_JOIN_S)

    def report(self) -> DiscoveryReport:
        """As of now."""
        certain_s = self._certain_s
        return replace(
            self._report, age_s=None if certain_s is None else time.monotonic() - certain_s
        )

    async def _run(self) -> None:
        try:
            while True:
                await self._round()
        finally:
            self._on_change = lambda endpoints: None
            await self._api.close()

    async def _round(self) -> None:
        """A LIST, a watch, and a pause."""
        began_s, asked_for_s = time.monotonic(), 0.0
        try:
            await self._watch(await self._list())
        except ClusterError as error:
            self._say(str(error))
            self._report = replace(self._report, num_errors=self._report.num_errors + 1)
            asked_for_s = error.retry_after_s
        if time.monotonic() - began_s > self._times.longest_pause_s:
            self._backoff.reset()  # however it ended: rounds as long as this load nobody
        await asyncio.sleep(self._backoff.next_s(asked_for_s))

    async def _list(self) -> str:
        """Takes the view anew; returns its version."""
        # Without a version of ours: the answer is what is there now, whichever server gives it.
        answer = await self._api.request(
            "GET", self._path, query=self._selector, timeout_s=self._times.list_s
        )
        self._slices = {}
        for item in list_at(answer, "items"):
            self._apply("ADDED", item)
        self._publish()
        return text_at(answer, "metadata", "resourceVersion")

    async def _watch(self, version: str) -> None:
        """Follows changes until the server ends the watch, in time or earlier.

        Raises:
            ClusterError: It breaks off, or does not end in time.
        """
        watch_s = max(1, int(self._times.watch_s * random.uniform(0.8, 1.0)))
        query = {
            **self._selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(watch_s),
        }
        events = self._api.events(self._path, query, timeout_s=watch_s + self._times.slack_s)
        async with aclosing(events):
            async for event in events:
                kind = text_at(event, "type")
                if kind == "ERROR":
                    raise refusal_in(event)
                self._apply(kind, at(event, "object"))
                self._publish()

    def _apply(self, kind: str, item: object) -> None:
        """Takes an object in, or out."""
        name = text_at(item, "metadata", "name")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in ("ADDED", "MODIFIED") and isinstance(item, dict):
            self._slices[name] = item

    def _publish(self) -> None:
        """The server was heard: the view is certain, and told if it differs."""
        view = read_slices(self._slices.values(), self._service.port_name)
        self._certain_s = time.monotonic()
        num_leaving = sum(endpoint.leaving for endpoint in view.endpoints)
        self._say(self._doubt(view))
        self._report = replace(
            self._report,
            num_up=len(view.endpoints) - num_leaving,
            num_leaving=num_leaving,
            num_down=view.num_down,
        )
        if view.endpoints != self._told:
            self._told = view.endpoints
            self._on_change(view.endpoints)

    def _doubt(self, view: ServiceView) -> str:
        """What looks like a mistake of who set it up; empty if nothing does."""
        if not view.num_slices:
            return "it has no EndpointSlices: is it there, with a selector?"
        if view.portless:
            return f"EndpointSlice {view.portless} has no port named {self._service.port_name}"
        return ""

    def _say(self, what: str) -> None:
        """Remembers what is wrong, and logs it if it is news."""
        problem = f"Service {self._name}: {what}" if what else ""
        if problem == self._report.problem:
            return
        if problem:
            logger.warning("%s", problem)
        else:
            logger.info("Service %s: its expert workers are known", self._name)
        self._report = replace(self._report, problem=problem)
