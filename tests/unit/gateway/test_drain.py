"""A gateway that is told to stop: who is connected is served and sent elsewhere, others at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
import grpc
import pytest

from expertmesh.v1 import generation_service_pb2 as pb
from gateway.drain import drain
from gateway.sequence import EngineStats, FinishReason
from tests.support.api import Json
from tests.support.grpc_calls import TIMEOUT_S, serving
from tests.support.scripted_engine import Gateway, scripted_gateway

TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, Json] = {
    TEXT: {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "model": "tiny", "max_tokens": 8},
    "/v1/responses": {"input": "hello"},
}
LONG_S = 60.0


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that keeps its only connection."""
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(gateway.url, connector=connector) as session:
        yield session


async def _connect(client: aiohttp.ClientSession) -> None:
    async with client.get("/health") as response:
        assert "Connection" not in response.headers


@pytest.mark.parametrize("path", BODIES)
async def test_a_kept_connection_is_served_once_more(
    path: str, gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """The answer closes it, so that the next request goes elsewhere; here it is refused."""
    await _connect(client)
    gateway.frontend.stop_accepting()
    for status in (200, 503):
        async with client.post(path, json=BODIES[path]) as response:
            assert response.status == status, await response.text()
            assert response.headers["Connection"] == "close"


async def test_after_a_stream_that_had_begun(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """Its head could not say that the connection ends, so one more request is served by it."""
    gateway.engine.manual = True
    async with client.post(TEXT, json={"prompt": "a", "stream": True}) as response:
        gateway.engine.emit("H")
        await response.content.readany()
        gateway.frontend.stop_accepting()
        gateway.engine.emit("i", finish_reason=FinishReason.STOP)
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    gateway.engine.manual = False
    for status in (200, 503):
        async with client.post(TEXT, json={"prompt": "a", "stream": True}) as response:
            assert (response.status, response.headers["Connection"]) == (status, "close")
            await response.read()


async def test_drained_at_once_without_clients(gateway: Gateway) -> None:
    """Nothing to wait for."""
    await asyncio.wait_for(drain(gateway.frontend, gateway.runner, LONG_S), TIMEOUT_S)
    assert not gateway.frontend.ready


async def test_a_drain_waits_for_requests(gateway: Gateway) -> None:
    """As long as the engine has any."""
    gateway.engine.load = EngineStats(num_running=1)
    draining = asyncio.create_task(drain(gateway.frontend, gateway.runner, LONG_S))
    done, _ = await asyncio.wait([draining], timeout=0.1)
    assert not done
    gateway.engine.load = EngineStats(num_waiting=1)
    done, _ = await asyncio.wait([draining], timeout=0.1)
    assert not done
    gateway.engine.load = EngineStats()
    await asyncio.wait_for(draining, TIMEOUT_S)


async def test_a_drain_waits_for_the_last_request_of_a_connection(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """For a moment; it is served if it comes."""
    await _connect(client)
    began_s = time.monotonic()
    await asyncio.wait_for(drain(gateway.frontend, gateway.runner, LONG_S), TIMEOUT_S)
    assert time.monotonic() - began_s > 0.9
    draining = asyncio.create_task(drain(gateway.frontend, gateway.runner, LONG_S))
    async with client.post(TEXT, json={"prompt": "a"}) as response:
        assert response.status == 200
    await asyncio.wait_for(draining, TIMEOUT_S)


async def test_a_drain_ends_in_time(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """And says what it gives up."""
    gateway.engine.load = EngineStats(num_running=2, num_waiting=1)
    await asyncio.wait_for(drain(gateway.frontend, gateway.runner, 0.05), TIMEOUT_S)
    assert caplog.messages == ["ending 3 requests"]


async def test_grpc_clients_are_sent_elsewhere() -> None:
    """A call that runs comes to its end; the next one is made by a new connection."""
    async with serving() as served:
        served.engine.manual = True
        call = served.stub.Generate(pb.GenerateRequest(prompt="a"), timeout=TIMEOUT_S)
        await served.engine.wait_for(lambda: len(served.engine.requests) == 1)
        served.frontend.stop_accepting()
        served.server.leave(LONG_S)
        served.engine.emit("Hi")
        assert (await call.read()).text == "Hi"
        left = served.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await asyncio.wait_for(left, TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.generate(prompt="a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        served.engine.emit(finish_reason=FinishReason.STOP)
        assert (await call.read()).finish_reason == pb.FINISH_REASON_STOP
