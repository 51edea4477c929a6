"""A small client of the API for tests, controllers and the kubelet of the tests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Self

import aiohttp

from tests.support.kube.resources import ApiError, Json, Resource

MERGE_PATCH = "application/merge-patch+json"


class KubeClient:
    """Talks to one API server while the context is open.

    Args:
        url: Of the server.
        token: Who asks; empty for nobody.
        timeout_s: Of each request but watches.
    """

    def __init__(self, url: str, token: str = "", *, timeout_s: float = 10.0) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # The certificate of a server that a test has started is its own.
        connector = aiohttp.TCPConnector(ssl=False)
        self._session = aiohttp.ClientSession(self._url, connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the context is not open"
        return self._session

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """One object."""
        return await self.request("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Json:
        """A list with its `items` and its version."""
        return await self.request("GET", resource.path(namespace), query=query)

    async def create(self, resource: Resource, item: Json, namespace: str = "") -> Json:
        """The object as the server made it."""
        return await self.request("POST", resource.path(namespace), body=_whole(resource, item))

    async def replace(self, resource: Resource, item: Json, part: str = "") -> Json:
        """Puts an object, or a subresource of it, in the place of what is there."""
        metadata = item["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"]) + part
        return await self.request("PUT", path, body=_whole(resource, item))

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Json, part: str = ""
    ) -> Json:
        """Changes an object, or a subresource such as "/status", by a merge patch."""
        path = resource.path(namespace, name) + part
        return await self.request("PATCH", path, body=patch, content_type=MERGE_PATCH)

    async def delete(
        self, resource: Resource, namespace: str, name: str, options: Json | None = None
    ) -> Json:
        """Deletes an object, with DeleteOptions."""
        return await self.request("DELETE", resource.path(namespace, name), body=options)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Any request; ApiError if it is refused."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if data else {}
        async with self._open.request(
            method, path, data=data, params=query, headers=headers, timeout=self._timeout
        ) as response:
            text = await response.text()
            if response.status >= 400:
                raise _error(response.status, text)
            return json.loads(text)

    async def watch(
        self, resource: Resource, namespace: str = "", *, timeout_s: float, **query: str
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Type and object of each event, until the server ends the watch."""
        params = {"watch": "1", "timeoutSeconds": f"{timeout_s:.0f}", **query}
        timeout = aiohttp.ClientTimeout(total=timeout_s + 10.0)
        async with self._open.get(
            resource.path(namespace), params=params, timeout=timeout
        ) as response:
            if response.status >= 400:
                raise _error(response.status, await response.text())
            async for line in response.content:
                event = json.loads(line)
                yield event["type"], event["object"]


def _whole(resource: Resource, item: Json) -> Json:
    return {"apiVersion": resource.api_version, "kind": resource.kind, **item}


def _error(code: int, text: str) -> ApiError:
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    return ApiError(code, status.get("reason", ""), status.get("message", text))
