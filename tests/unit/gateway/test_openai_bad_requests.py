"""Bad HTTP requests against a scripted engine: each gets its named error and starts no work."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from gateway.service import ApiLimits
from tests.support.bad_requests import BadRequest, corpus
from tests.support.scripted_engine import Gateway, scripted_gateway

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as gateway:
        yield gateway


def send(port: int, bad: BadRequest) -> tuple[int, dict[str, str], bytes]:
    """Sends a request byte for byte; blocking."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(bad.method, bad.path, bad.body, dict(bad.headers))
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("bad", corpus(), ids=lambda bad: bad.name)
async def test_every_bad_request_has_its_error(gateway: Gateway, bad: BadRequest) -> None:
    """Status, code and parameter are the right ones, in a short JSON envelope."""
    status, headers, body = await asyncio.to_thread(send, gateway.port, bad)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (bad.status, bad.code, bad.param), body
    assert sorted(error) == ["code", "message", "param", "type"]
    assert len(body) < 2048
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert gateway.engine.requests == []


EDGES = {
    "oversized integer in an ignored field": (b'{"prompt":"a","x":[%s]}' % (b"9" * 5000)),
    "too many values": b'{"prompt":[' + b"1," * 250_001 + b"1]}",
    "open string full of quotes": b'{"a":"' + b'\\"' * 100_000,
    "brackets in an open string": b'{"a":"' + b"[" * 100_000,
    "closing brackets": b"]" * 100_000,
    "half an escape": b'{"a":"\\',
    "control character": b'{"prompt":"a\nb"}',
    "deep behind a string": b'{"a":"\\\\","b":' + b"[" * 40 + b"]" * 40 + b"}",
}


@pytest.mark.parametrize("name", EDGES)
async def test_edges_of_the_scanner(gateway: Gateway, name: str) -> None:
    """Odd bodies are refused within a second and never become an internal error."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
        started = asyncio.get_running_loop().time()
        url = f"{gateway.url}/v1/completions"
        async with session.post(url, data=EDGES[name], headers=JSON) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert asyncio.get_running_loop().time() - started < 1.0


async def test_a_body_at_the_limit_is_read_and_one_above_is_not() -> None:
    """The limit counts bytes exactly, with and without a declared length."""
    limits = ApiLimits(max_body_bytes=1000)
    good = json.dumps({"prompt": "a"}).encode().ljust(1000)

    async def chunked(body: bytes) -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    async with scripted_gateway(limits=limits) as gateway, aiohttp.ClientSession() as session:
        url = f"{gateway.url}/v1/completions"
        statuses = []
        for body in (good, good + b" "):
            async with session.post(url, data=body, headers=JSON) as response:
                statuses.append(response.status)
            async with session.post(url, data=chunked(body), headers=JSON) as response:
                statuses.append(response.status)
                last = await response.json()
        assert statuses == [200, 200, 413, 413]
        assert last["error"]["code"] == "request_too_large"


async def test_a_huge_body_is_cut_early() -> None:
    """A chunked body without an end is answered after the limit, and the connection is closed."""
    limits = ApiLimits(max_body_bytes=100_000)
    async with scripted_gateway(limits=limits) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: application/json\r\n\r\n"
        )
        for _ in range(40):
            writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in answer


async def test_a_slow_body_is_given_up() -> None:
    """A body that stops half-way is answered 408 and the connection closed."""
    async with scripted_gateway(limits=ApiLimits(body_timeout_s=0.2)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"], ids=["silent", "half"])
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    """A client that sends nothing, or half a header, is disconnected after the header timeout."""
    async with scripted_gateway(limits=ApiLimits(header_timeout_s=0.2)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "http2", "length", "long header", "chunk size"],
)
async def test_what_is_not_http_gets_an_envelope(garbage: bytes) -> None:
    """A client that does not speak HTTP gets a 400 envelope and is disconnected."""
    async with scripted_gateway() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(garbage)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.split(b" ")[1] == b"400"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_http_0_9_is_refused() -> None:
    """A request line without a version is disconnected, and the server goes on."""
    async with scripted_gateway() as gateway, aiohttp.ClientSession() as session:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/completions\r\n\r\n")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        async with session.get(f"{gateway.url}/health") as response:
            assert response.status == 200
