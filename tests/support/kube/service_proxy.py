"""What kube-proxy does for one Service: forwards connections to a pod that is ready."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import TracebackType
from typing import Self

from tests.support.kube.controllers.endpoint_slices import SERVICE_NAME
from tests.support.kube.resources import ENDPOINT_SLICES
from tests.support.kube.selectors import selector
from tests.support.kube.store import Store

_CHUNK_BYTES = 65536


class ServiceProxy:
    """Listens on loopback while the context is open.

    Args:
        store: Where the slices of the Service are.
        namespace: Of the Service.
        service: Its name.
        port: Name of the port.
    """

    def __init__(self, store: Store, namespace: str, service: str, port: str) -> None:
        self._store, self._namespace = store, namespace
        self._matches = selector(f"{SERVICE_NAME}={service}", "")
        self._port_name = port
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._forwarding: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)

    def endpoints(self) -> list[tuple[str, int]]:
        """Addresses and ports of the pods that are ready."""
        return [
            (endpoint["addresses"][0], port["port"])
            for item in self._store.list(ENDPOINT_SLICES, self._namespace, self._matches)
            for port in item["ports"]
            if port["name"] == self._port_name
            for endpoint in item["endpoints"] or []
            if endpoint["conditions"]["ready"]
        ]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forwarding.add(task)
        try:
            await self._forward(reader, writer)
        except OSError:
            pass  # one side is gone, and with it the other
        finally:
            writer.close()
            self._forwarding.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoints = self.endpoints()
        if not endpoints:
            return
        address, port = endpoints[next(self._turn) % len(endpoints)]
        pod_reader, pod_writer = await asyncio.open_connection(address, port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, pod_writer))
                group.create_task(_copy(pod_reader, writer))
        except* OSError:
            pass
        finally:
            pod_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
