"""Requests to the API server of Kubernetes, as JSON.

The official client, `kubernetes.aio`, supplies credentials, TLS and transport. Its models are left
alone: they refuse what servers do send, such as `endpoints: null` of an empty EndpointSlice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Self, TypeVar

import aiohttp

from expertmesh.errors import PeerError, StartupError
from gateway.cluster.access import ClusterAccess, Credentials
from gateway.cluster.fields import JsonObject, number_at, text_at

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

_JSON = "application/json"
_ERROR_BODY_S = 2.0
_CLOSE_S = 0.5
_T = TypeVar("_T")


class ClusterError(PeerError):
    """The API server does not answer, or refuses.

    Args:
        message: What it says, or why it says nothing.
        status: Of HTTP; 0 if there was no answer.
        retry_after_s: For how long it wants to be left alone.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ClusterApi:
    """A client for one event loop. Credentials are read again when they are refused.

    Args:
        access: Where credentials come from.
        credentials: What came from there at start.

    Attributes:
        namespace: The gateway's own.
    """

    def __init__(self, access: ClusterAccess, credentials: Credentials) -> None:
        self._access = access
        self._client: ApiClient | None = credentials.client()
        self.namespace = credentials.namespace

    @classmethod
    def open(cls, access: ClusterAccess) -> Self:
        """Checks that there are credentials and asks nothing. Not for a thread with a running loop.

        Raises:
            StartupError: There are none, or the client is not installed.
        """
        return cls(access, asyncio.run(access.load()))

    async def close(self) -> None:
        """Drops all connections."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.close(), _CLOSE_S)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = _JSON,
        timeout_s: float = 10.0,
    ) -> JsonObject:
        """The object that the server answers with.

        Args:
            method: Of HTTP.
            path: From `/api` or `/apis` on.
            query: Parameters.
            body: What to send.
            content_type: Of `body`.
            timeout_s: Seconds until the answer is there in full.

        Raises:
            ClusterError: It refuses, or there is no such answer in time.
        """
        deadline_s = _now_s() + timeout_s
        sent = self._send(method, path, query, body, content_type, timeout_s)
        response = await _in_time(sent, deadline_s)
        try:
            return _parsed(await _in_time(response.read(), deadline_s))
        finally:
            _let_go(response)

    async def events(
        self, path: str, query: Mapping[str, str], *, timeout_s: float
    ) -> AsyncGenerator[JsonObject, None]:
        """Objects that the server sends line by line, to the end of the answer.

        Args:
            path: From `/apis` on.
            query: Parameters.
            timeout_s: Seconds to the end; a connection that was cut off unnoticed is found by that.

        Raises:
            ClusterError: It refuses, breaks off, or does not end in time.
        """
        deadline_s = _now_s() + timeout_s
        response = await _in_time(
            self._send("GET", path, query, None, _JSON, timeout_s), deadline_s
        )
        try:
            while line := await _in_time(response.content.readline(), deadline_s):
                yield _parsed(line)
        finally:
            _let_go(response)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: JsonObject | None,
        content_type: str,
        timeout_s: float,
    ) -> aiohttp.ClientResponse:
        client = await self._connected()
        method, url, headers, sent, _ = await client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": _JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await client.call_api(method, url, headers, sent, _request_timeout=timeout_s)
        response: aiohttp.ClientResponse = answer.response
        if response.status < HTTPStatus.BAD_REQUEST:
            return response
        if response.status == HTTPStatus.UNAUTHORIZED:
            await self.close()
        raise await _refusal(response)

    async def _connected(self) -> ApiClient:
        if self._client is None:
            self._client = (await self._access.load()).client()
        return self._client


async def _in_time(awaitable: Awaitable[_T], deadline_s: float) -> _T:
    """What comes of it.

    Raises:
        ClusterError: Nothing until the deadline, or the connection failed.
    """
    try:
        async with asyncio.timeout_at(deadline_s):
            return await awaitable
    except TimeoutError as error:
        raise ClusterError("the API server is silent") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line without end
        reason = str(error) or type(error).__name__
        raise ClusterError(f"no answer of the API server: {reason}") from error
    except StartupError as error:
        raise ClusterError(str(error)) from error


async def _refusal(response: aiohttp.ClientResponse) -> ClusterError:
    """An answer as an error."""
    try:
        async with asyncio.timeout(_ERROR_BODY_S):
            content = await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError):
        content = b""
    finally:
        _let_go(response)
    message = _status_message(content) or response.reason or "no reason given"
    after = response.headers.get("Retry-After", "")
    return ClusterError(
        f"the API server answers {response.status}: {message}",
        status=response.status,
        retry_after_s=float(after) if after.isascii() and after.isdigit() else 0.0,
    )


def _let_go(response: aiohttp.ClientResponse) -> None:
    """Keeps the connection for later if the answer was read in full; else cuts it off at once.

    Closing takes TLS a farewell of the other side, which may never come, and not before the loop
    has ended.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _status_message(content: bytes) -> str:
    try:
        return text_at(json.loads(content), "message")
    except ValueError:
        return content[:200].decode(errors="replace").strip()


def _parsed(content: bytes) -> JsonObject:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ClusterError(f"the API server sends no JSON: {content[:100]!r}") from error
    if not isinstance(value, dict):
        raise ClusterError(f"the API server sends no object: {content[:100]!r}")
    return value


def refusal_in(event: JsonObject) -> ClusterError:
    """The error that an event of type ERROR carries."""
    status = number_at(event, "object", "code")
    message = text_at(event, "object", "message") or "no reason given"
    return ClusterError(f"the API server ends the watch with {status}: {message}", status=status)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
