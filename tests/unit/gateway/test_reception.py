"""More connections than a gateway has descriptors for."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from expertmesh.descriptors import descriptor_limit, raise_descriptor_limit
from gateway.descriptor_shares import DescriptorShares
from gateway.http_connections import make_runner
from gateway.listen import bind
from gateway.reception import Reception
from gateway.service import ApiLimits
from tests.support.certificates import Authority
from tests.support.endpoint_slices import until
from tests.support.scripted_engine import Gateway, scripted_gateway

pytestmark = pytest.mark.timeout(60)

FREE, NONE = DescriptorShares(2**20, 1, 2), DescriptorShares(0, 1, 2)
"""All descriptors are for clients, or none is; two connections too many are there at a time."""


class Crowd:
    """Whether there are too many connections."""

    def __init__(self) -> None:
        self.shares = FREE

    def __call__(self) -> DescriptorShares:
        """For a reception."""
        return self.shares


@dataclass
class Client:
    """A connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        """Sends a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with lower-case names, body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def ends(self) -> bool:
        """True if the server closes it without a further byte."""
        return await self.reader.read() == b""


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """A new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.fixture
def crowd() -> Crowd:
    """There are few connections."""
    return Crowd()


@pytest.fixture
async def gateway(crowd: Crowd) -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway(shares=crowd) as running:
        yield running


async def test_one_too_many_is_told_so(crowd: Crowd, gateway: Gateway) -> None:
    """503 with Retry-After, and the end of the connection; whoever was there goes on."""
    async with connected(gateway.port) as early:
        await early.ask("GET", "/v1/models")
        assert (await early.answer())[0] == 200
        crowd.shares = NONE
        async with connected(gateway.port) as late:
            await late.ask("POST", "/v1/completions", b'{"prompt": "a"}')
            status, headers, body = await late.answer()
            assert (status, headers["connection"]) == (503, "close")
            assert int(headers["retry-after"]) > 0
            assert b'"code":"engine_overloaded"' in body
            assert await late.ends()
        await early.ask("GET", "/v1/models")
        assert (await early.answer())[0] == 200
    crowd.shares = FREE
    async with connected(gateway.port) as next_one:
        await next_one.ask("GET", "/v1/models")
        status, headers, _ = await next_one.answer()
        assert (status, headers.get("connection")) == (200, None)
    assert gateway.engine.requests == []


async def test_who_looks_after_the_gateway_is_answered(crowd: Crowd, gateway: Gateway) -> None:
    """Once, however many others there are; the metric counts them, too."""
    crowd.shares = NONE
    async with connected(gateway.port) as probe:
        await probe.ask("GET", "/health")
        status, headers, _ = await probe.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await probe.ends()
    async with connected(gateway.port) as scrape:
        await scrape.ask("GET", "/metrics")
        _, _, body = await scrape.answer()
    assert b"moe_connections_turned_away_total 2.0" in body


async def test_other_clients_get_errors_of_their_kind(crowd: Crowd, gateway: Gateway) -> None:
    """Those of /v1/messages are told as their API does."""
    crowd.shares = NONE
    async with connected(gateway.port) as client:
        await client.ask("POST", "/v1/messages", b"{}")
        status, _, body = await client.answer()
    assert status == 503
    assert b'"type":"overloaded_error"' in body


async def test_a_long_body_does_not_hide_the_answer(crowd: Crowd, gateway: Gateway) -> None:
    """What was not read when a connection ends would reset it, and the answer be lost."""
    crowd.shares = NONE
    async with connected(gateway.port) as client:
        asking = asyncio.create_task(client.ask("POST", "/v1/completions", bytes(3 << 20)))
        assert (await client.answer())[0] == 503
        await asking
        assert await client.ends()


async def test_the_silent_make_room(
    crowd: Crowd, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Only some connections too many are there at a time; the oldest goes, without a reset. One
    line in the log tells of all.
    """
    crowd.shares = NONE
    port = gateway.port
    async with connected(port) as first, connected(port) as second, connected(port) as third:
        assert await first.ends()
        for client in (second, third):
            await client.ask("GET", "/v1/models")
            assert (await client.answer())[0] == 503
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "too many connections" in caplog.text


async def test_without_any_descriptor(
    crowd: Crowd, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that was turned away goes, and a new one waits for its descriptor."""
    crowd.shares = NONE
    async with connected(gateway.port) as silent:
        await until(lambda: len(caplog.records) == 1)
        crowd.shares = FREE
        waiting = socket.create_connection(("127.0.0.1", gateway.port))  # in one go: not accepted
        with no_descriptors():
            assert await silent.ends()
        client = Client(*await asyncio.open_connection(sock=waiting))
        await client.ask("GET", "/v1/models")
        assert (await client.answer())[0] == 200
        client.writer.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open none; those that it has stay."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_tls(tmp_path: Path, crowd: Crowd) -> None:
    """Handshakes count from their beginning, and end with the server."""
    files = Authority.new().issue(tmp_path)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(files.cert, files.key)
    trusting = ssl.create_default_context(cafile=files.ca)
    runner = make_runner(web.Application(), ApiLimits(header_timeout_s=1000.0))
    await runner.setup()
    bound = bind("--port", "127.0.0.1", 0)
    port = bound.getsockname()[1]
    reception = Reception(runner, bound, CollectorRegistry(), ssl_context=served, shares=crowd)
    await reception.start()
    async with connected(port) as early:
        crowd.shares = NONE
        async with connected(port) as first, connected(port), connected(port, trusting) as client:
            assert await first.ends()
            await client.ask("GET", "/health")
            assert (await client.answer())[0] == 404  # this application has no routes
            await runner.cleanup()
            assert await early.ends()


@pytest.mark.parametrize("limit", [16, 256, 1024, 2**20])
def test_shares(limit: int) -> None:
    """What clients cannot have is enough for the answers to those who are too many, and more."""
    shares = DescriptorShares.of(limit)
    own = limit - shares.below - shares.grpc
    assert 0 < shares.turned_away <= own // 4
    assert shares.below >= limit // 2
    assert shares.grpc >= limit // 4


def test_the_limit_is_raised() -> None:
    """From what this process may have to what it could."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        raise_descriptor_limit()
        assert descriptor_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
