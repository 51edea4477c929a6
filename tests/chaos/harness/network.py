"""A network between a gateway and expert workers that can be cut, slowed down and broken.

A line listens on 127.0.0.2 at the ports of a worker and connects to 127.0.0.1 at the same ports, so
it carries all that the worker offers: its gRPC port, and the direct connections that are named
there. One thread, `network`, carries everything.

While a line is cut nothing is lost, as with a cable that is pulled and put back: bytes wait, and
new connections are accepted and stay silent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from expertmesh.direct import MAGIC, TOKEN_BYTES
from expertmesh.wire_encode import LENGTH
from tests.chaos.harness.pool import HOST, PoolWorker

NEAR = "127.0.0.2"
"""Where lines listen."""
_CHUNK_BYTES = 1 << 18
_CUT_POLL_S = 0.01
_TIMEOUT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close drops what was not sent, and says so

MessageFault = Callable[[bytes], Sequence[bytes]]
"""Takes a message, and returns those that are passed on instead."""


def unchanged(message: bytes) -> Sequence[bytes]:
    """No fault."""
    return (message,)


@dataclass
class Conditions:
    """What a line does at present; written by tests, read by the network's thread."""

    is_cut: bool = False
    latency_s: float = 0.0
    """Of every chunk, each way."""
    bytes_per_s: float = float("inf")
    """Of every connection, each way."""
    reply_bytes_left: int | None = None
    """Of replies on direct connections, until all connections are reset."""
    reply_fault: MessageFault = unchanged
    """On direct connections."""
    request_fault: MessageFault = unchanged
    """On direct connections."""

    @property
    def is_used_up(self) -> bool:
        """True once connections are to be reset."""
        return self.reply_bytes_left == 0

    def shorten(self, replies: bytes) -> bytes:
        """As many bytes of replies as may still pass."""
        left = self.reply_bytes_left
        if left is None:
            return replies
        self.reply_bytes_left = max(0, left - len(replies))
        return replies[:left]


class _Bytes:
    """Passes bytes on as they are."""

    def take(self, data: bytes, now: Conditions) -> bytes:
        """What is passed on."""
        return data


class _Frames(_Bytes):
    """One way of a direct connection: a greeting, then frames."""

    def __init__(self, greeting_size: int) -> None:
        self._buffer = bytearray()
        self._greeting_left = greeting_size

    def changed(self, data: bytes, fault: MessageFault) -> bytes:
        """Whole frames, after what a fault makes of them."""
        self._buffer += data
        return self._greeting() + b"".join(
            LENGTH.pack(len(instead)) + instead
            for message in self._messages()
            for instead in fault(message)
        )

    def _greeting(self) -> bytes:
        greeting = bytes(self._buffer[: self._greeting_left])
        del self._buffer[: self._greeting_left]
        self._greeting_left -= len(greeting)
        return greeting

    def _messages(self) -> Iterator[bytes]:
        while not self._greeting_left and len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield message


class _Replies(_Frames):
    """What an expert worker says on a direct connection."""

    def __init__(self) -> None:
        super().__init__(len(MAGIC))

    def take(self, data: bytes, now: Conditions) -> bytes:
        """See `Conditions`."""
        return now.shorten(self.changed(data, now.reply_fault))


class _Requests(_Frames):
    """What an expert worker is told on a direct connection."""

    def __init__(self) -> None:
        super().__init__(TOKEN_BYTES)

    def take(self, data: bytes, now: Conditions) -> bytes:
        """See `Conditions`."""
        return self.changed(data, now.request_fault)


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Line:
    """All connections to one worker. Made by `network`.

    Args:
        worker: Who is at the far end.
    """

    def __init__(self, worker: PoolWorker) -> None:
        self.now = Conditions()
        self._worker = worker
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """host:port to give to a gateway."""
        return f"{NEAR}:{self._worker.port}"

    @contextmanager
    def under(self, **conditions: Any) -> Iterator[None]:
        """The line is so for a while; see `Conditions`."""
        before = self.now
        self.now = replace(before, **conditions)
        try:
            yield
        finally:
            self.now = before

    async def open(self) -> None:
        """Listens."""
        for port, requests, replies in (
            (self._worker.port, _Bytes, _Bytes),
            (self._worker.direct_port, _Requests, _Replies),
        ):
            carry = partial(self._carry, port, requests, replies)
            self._servers.append(await asyncio.start_server(carry, NEAR, port, limit=_CHUNK_BYTES))

    async def close(self) -> None:
        """Ends everything."""
        for server in self._servers:
            server.close()
        await self.reset()

    async def reset(self) -> None:
        """Resets all connections; new ones are served."""
        for writer in self._writers:
            with suppress(OSError):  # it is closed already
                own = writer.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _carry(
        self,
        port: int,
        requests: Callable[[], _Bytes],
        replies: Callable[[], _Bytes],
        near_reader: asyncio.StreamReader,
        near_writer: asyncio.StreamWriter,
    ) -> None:
        self._writers.add(near_writer)
        with suppress(OSError):
            await self._while_cut()
            far_reader, far_writer = await asyncio.open_connection(HOST, port, limit=_CHUNK_BYTES)
            self._writers.add(far_writer)
            await asyncio.gather(
                self._pump(near_reader, far_writer, requests()),
                self._pump(far_reader, near_writer, replies()),
            )
            self._writers.discard(far_writer)
        near_writer.close()
        self._writers.discard(near_writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carrier: _Bytes
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._while_cut()
                await asyncio.sleep(self.now.latency_s + len(data) / self.now.bytes_per_s)
                writer.write(carrier.take(data, self.now))
                await writer.drain()
                if self.now.is_used_up:
                    await self.reset()
        writer.close()

    async def _while_cut(self) -> None:
        while self.now.is_cut:  # noqa: ASYNC110 (another thread mends it)
            await asyncio.sleep(_CUT_POLL_S)


class Network:
    """Lines to workers, and the thread that carries what is on them."""

    def __init__(self, workers: Sequence[PoolWorker]) -> None:
        self.lines = {worker: Line(worker) for worker in workers}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(line.open() for line in self.lines.values())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do(line.close() for line in self.lines.values())
        self._do([self._end()])
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self, worker: PoolWorker) -> None:
        """Resets all connections to a worker; new ones are served."""
        self._do([self.lines[worker].reset()])

    def _do(self, steps: Iterable[Coroutine[None, None, None]]) -> None:
        for step in steps:
            asyncio.run_coroutine_threadsafe(step, self._loop).result(_TIMEOUT_S)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
