"""/v1/moe and /metrics/experts: what they answer, to whom, and that streams end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import pytest

from gateway.api_keys import ApiKeys
from gateway.app import Access
from gateway.telemetry import streams
from gateway.telemetry.telemetry import Telemetry
from tests.support.scripted_engine import Gateway, scripted_gateway
from tests.support.seen_mesh import SeenMesh

KEY = "key-of-a-user"
PATHS = ["/v1/moe/experts", "/v1/moe/workers", "/v1/moe/placement", "/v1/moe/stream"]


@pytest.fixture
def seen() -> SeenMesh:
    """Counters of a mesh."""
    return SeenMesh()


@pytest.fixture
async def gateway(seen: SeenMesh) -> AsyncIterator[Gateway]:
    """A server that shows it."""
    async with scripted_gateway(telemetry=Telemetry(seen.sources())) as running:
        yield running


async def test_experts(gateway: Gateway, session: aiohttp.ClientSession, seen: SeenMesh) -> None:
    """All of the window, by layer and expert."""
    seen.rows_LE += [[40, 20, 0, 20], [10, 10, 10, 10]]
    seen.pairs = {"w0": {1: 3}, "w1": {}}
    async with session.get(f"{gateway.url}/v1/moe/experts?window=10") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        body = await response.json()
    assert 0 < body.pop("window_s") < 60
    holders = [[sorted(held) for held in layer] for layer in body.pop("holders")]
    assert holders == [[[-1, 0], [-1, 0], [0, 1], [-1, 1]]] * 2
    assert body == {
        "object": "moe.experts",
        "epoch": 5,
        "layers": [1, 3],
        "num_experts": 4,
        "top_k": 2,
        "rows": [40, 20],
        "tokens": [[40, 20, 0, 20], [10, 10, 10, 10]],
        "share": [[0.5, 0.25, 0, 0.25], [0.25] * 4],
        "utilisation": [[2, 1, 0, 1], [1, 1, 1, 1]],
        "copies": [[1, 1, 2, 1]] * 2,
        "workers": ["w0", "w1"],
        "worker_tokens": [[3, 0], [0, 0]],
        "imbalance": {"expert": [2, 1], "worker": [2, 1]},
        "entropy": [0.75, 1],
        "dead": [1, 0],
        "hottest": [[0, 1, 3], [0, 1, 2]],
    }


@pytest.mark.parametrize("window", ["7", "", "-10", "10.0", "nan", "all the time there ever was"])
async def test_other_windows_are_refused(
    gateway: Gateway, session: aiohttp.ClientSession, window: str
) -> None:
    """With what is possible."""
    asked = {"window": window}
    async with session.get(f"{gateway.url}/v1/moe/experts", params=asked) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["param"], error["code"]) == ("window", "invalid_value")
    assert "10, 60, 300, all" in error["message"]


async def test_workers(gateway: Gateway, session: aiohttp.ClientSession, seen: SeenMesh) -> None:
    """Totals, what they do now, and who is slow."""
    seen.call("w0", calls=10, rows_out=90, rows_back=100, bytes_out=9, round_trip_s=0.01)
    seen.call("w1", calls=10, rows_back=100, round_trip_s=0.5, compute_s=0.4, hedges=1)
    async with session.get(f"{gateway.url}/v1/moe/workers") as response:
        assert response.status == 200
        body = await response.json()
    assert (body["straggler"]["worker_id"], body["straggler"]["part"]) == ("w1", "compute")
    first, second = body["workers"]
    assert {name: first[name] for name in ("worker_id", "address", "node", "device", "state")} == {
        "worker_id": "w0",
        "address": "at-w0",
        "node": "node-of-w0",
        "device": "cpu",
        "state": "ready",
    }
    assert (first["resident_experts"], first["copies"], first["sole_copies"]) == (6, 2, 4)
    assert (first["cpu_s"], first["rss_bytes"]) == (1.5, 1 << 20)
    assert (first["is_straggler"], second["is_straggler"]) == (False, True)
    assert (first["total"]["rows_out"], first["recent"]["round_trip_ms"]) == (90, 1.0)
    assert (second["recent"]["compute_ms"], second["recent"]["network_ms"]) == (40.0, 10.0)
    assert second["total"]["hedges"] == second["recent"]["hedges"] == 1


async def test_placement_of_what_is_not_moved(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Expert workers say themselves what they hold."""
    async with session.get(f"{gateway.url}/v1/moe/placement") as response:
        body = await response.json()
    assert (body["mode"], body["layers"], body["num_experts"]) == ("static", [1, 3], 8)
    assert (body["num_covered"], body["num_copies"], body["fewest_copies"]) == (8, 10, 1)
    assert body["workers"][1]["resident"] == {"1": [2, 3], "3": [2, 3]}


@pytest.mark.parametrize("path", PATHS)
async def test_keys(session: aiohttp.ClientSession, path: str) -> None:
    """As everywhere under /v1; Prometheus needs none."""
    async with scripted_gateway(access=Access(ApiKeys.of([KEY]))) as running:
        async with session.get(running.url + path) as response:
            assert response.status == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        async with session.get(running.url + path, headers=headers) as response:
            assert response.status == 200
        async with session.get(f"{running.url}/metrics/experts") as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_the_stream(gateway: Gateway, session: aiohttp.ClientSession, seen: SeenMesh) -> None:
    """An event at once, one each second, and an end when the gateway stops."""
    seen.stats = replace(seen.stats, num_running=3, num_waiting=9, kv_blocks_total=4)
    async with session.get(f"{gateway.url}/v1/moe/stream") as response:
        assert response.content_type == "text/event-stream"
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["queue"] == {"running": 3, "waiting": 9}
        assert first["ttft_s"] == {"p50": None, "p95": None, "p99": None}
        assert [worker["worker_id"] for worker in first["workers"]] == ["w0", "w1"]
        assert [alert["code"] for alert in first["alerts"]] == ["long_queue"]
        seen.stats = replace(seen.stats, num_running=4)
        await response.content.readline()
        second = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert second["queue"]["running"] == 4
        assert 0.5 < second["time"] - first["time"] < 5
        gateway.frontend.stop_accepting()
        async with asyncio.timeout(5):
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_the_server_stops_while_streams_are_open(session: aiohttp.ClientSession) -> None:
    """At once, and they end in order."""
    async with AsyncExitStack() as stack, scripted_gateway() as running:
        response = await stack.enter_async_context(session.get(f"{running.url}/v1/moe/stream"))
        await response.content.readline()
        running.frontend.close()
        begun_s = asyncio.get_running_loop().time()
        await running.runner.cleanup()
        assert asyncio.get_running_loop().time() - begun_s < 0.9
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_there_are_not_too_many_streams(
    gateway: Gateway, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is told to come later; one that leaves makes room."""
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    url = f"{gateway.url}/v1/moe/stream"
    async with session.get(url) as first, session.get(url) as second:
        assert (first.status, second.status) == (200, 200)
        async with session.get(url) as third:
            assert third.status == 503
            assert float(third.headers["Retry-After"]) > 0
            assert (await third.json())["error"]["code"] == "engine_overloaded"
    async with asyncio.timeout(5):
        while True:
            async with session.get(url) as later:
                if later.status == 200:
                    return
