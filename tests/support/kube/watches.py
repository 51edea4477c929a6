"""Watches: what a client is told of changes, event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from tests.support.kube.resources import ApiError, Json, Resource
from tests.support.kube.selectors import Matches
from tests.support.kube.store import Event, Store

Send = Callable[[str, Json], Awaitable[None]]

_LONGEST_S = 1800.0
_SYNCED = {"k8s.io/initial-events-end": "true"}


@dataclass(frozen=True)
class WatchRequest:
    """What is to be watched.

    Args:
        resource: Its kind.
        namespace: Empty for all.
        matches: Only such objects.
        version: Changes after this one; empty to begin with all objects.
        timeout_s: After this the server ends it.
        wants_bookmarks: Bookmarks may be sent.
        wants_all: All objects first, then a bookmark that says so.
    """

    resource: Resource
    namespace: str
    matches: Matches
    version: str
    timeout_s: float
    wants_bookmarks: bool
    wants_all: bool


def timeout_of(text: str | None) -> float:
    """Of the query parameter `timeoutSeconds`."""
    return min(float(text or _LONGEST_S), _LONGEST_S)


class Watches:
    """All watches of a server.

    Attributes:
        are_silent: They stay open and tell nothing, as when a connection is half open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._generation = 0
        self.are_silent = False

    def drop(self) -> None:
        """Ends all watches at once."""
        self._generation += 1
        self._store.wake()

    async def serve(self, request: web.Request, wanted: WatchRequest) -> web.StreamResponse:
        """Tells of changes until it times out, is dropped, or cannot go on."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)

        async def send(kind: str, item: Json) -> None:
            await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

        try:
            await self._tell(wanted, send)
        except ApiError as error:
            await send("ERROR", error.status)
        except ConnectionResetError:
            pass  # the client has gone
        return response

    async def _tell(self, wanted: WatchRequest, send: Send) -> None:
        generation, deadline = self._generation, _time() + wanted.timeout_s
        version = self._store.version
        if wanted.wants_all or wanted.version in ("", "0"):
            for item in self._store.list(wanted.resource, wanted.namespace, wanted.matches):
                await send("ADDED", item)
            if wanted.wants_all:
                await send("BOOKMARK", _bookmark(wanted.resource, version, _SYNCED))
        else:
            version = int(wanted.version)
        while generation == self._generation:
            change = self._store.next_change  # before looking, so that none is missed
            for event in [] if self.are_silent else self._store.since(version):
                version = event.version
                for kind, item in _told(event, wanted):
                    await send(kind, item)
            try:
                await asyncio.wait_for(change.wait(), max(0.0, deadline - _time()))
            except TimeoutError:
                break
        else:
            return
        if wanted.wants_bookmarks and not self.are_silent:
            await send("BOOKMARK", _bookmark(wanted.resource, version, {}))


def _told(event: Event, wanted: WatchRequest) -> list[tuple[str, Json]]:
    """What a watch tells of a change: nothing, or one event."""
    key = event.key
    if event.is_hidden or key.resource != wanted.resource:
        return []
    if wanted.namespace not in ("", key.namespace):
        return []
    was = event.before is not None and wanted.matches(event.before)
    if event.after is not None and wanted.matches(event.after):
        return [("MODIFIED" if was else "ADDED", event.after)]
    if not was or event.before is None:
        return []
    version = {"resourceVersion": str(event.version)}
    return [("DELETED", {**event.before, "metadata": {**event.before["metadata"], **version}})]


def _bookmark(resource: Resource, version: int, annotations: dict[str, str]) -> Json:
    metadata = {"resourceVersion": str(version), "annotations": annotations}
    return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}


def _time() -> float:
    return asyncio.get_running_loop().time()
