"""Endpoints outside /v1, and what holds for every answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.openmetrics import parser as openmetrics

from expertmesh import __version__
from gateway.engine.engine_observer import RequestTimes
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.sequence import (
    DispatchStats,
    EngineStats,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from tests.support.scripted_engine import Gateway, scripted_gateway

BROKEN = MeshStatus(
    epoch=7,
    workers=(
        ExpertWorkerStatus("w0", "10.0.0.1:1", ExpertWorkerState.READY, num_experts=4),
        ExpertWorkerStatus("", "10.0.0.2:1", ExpertWorkerState.UNREACHABLE, "no answer"),
    ),
    uncovered={1: (4, 5)},
    ready=False,
)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as running:
        yield running


async def test_health_is_about_the_process(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Empty 200 while the engine lives, even without experts; 503 once it is dead."""
    gateway.mesh = BROKEN
    async with session.get(f"{gateway.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    gateway.engine.load = EngineStats(alive=False)
    async with session.get(f"{gateway.url}/health") as response:
        assert (response.status, await response.read()) == (503, b"")


async def test_ready_says_what_is_missing(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """200 when requests can be served; otherwise the workers and the uncovered experts."""
    async with session.get(f"{gateway.url}/ready") as response:
        assert (response.status, (await response.json())["ready"]) == (200, True)
    gateway.mesh = BROKEN
    async with session.get(f"{gateway.url}/ready") as response:
        assert response.status == 503
        report = await response.json()
    assert (report["ready"], report["epoch"], report["uncovered"]) == (False, 7, {"1": [4, 5]})
    assert report["workers"][1] == {
        "worker_id": "",
        "address": "10.0.0.2:1",
        "state": "unreachable",
        "message": "no answer",
        "num_experts": 0,
    }


async def test_new_requests_are_refused_while_experts_are_missing(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """At once, with 503 and what is missing, and nothing reaches the engine."""
    gateway.mesh = BROKEN
    async with session.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}) as response:
        assert response.status == 503
        assert float(response.headers["Retry-After"]) > 0
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "expert_unavailable")
    assert "layer 1 expert 4" in error["message"]
    assert "10.0.0.2" not in error["message"], "addresses are for /ready"
    assert gateway.engine.requests == []


async def test_a_stopping_gateway_refuses_new_requests(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """After stop_accepting: not ready, and 503 with Retry-After."""
    gateway.frontend.stop_accepting()
    async with session.get(f"{gateway.url}/ready") as response:
        assert response.status == 503
        assert (await response.json())["message"] == "the gateway is stopping"
    async with session.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}) as response:
        assert (response.status, "Retry-After" in response.headers) == (503, True)


async def test_version(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Version of the product, and HEAD wherever there is GET."""
    async with session.get(f"{gateway.url}/version") as response:
        assert (await response.json())["version"] == __version__
    for path in ("/health", "/metrics", "/v1/models"):
        async with session.head(gateway.url + path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_models(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """The list and the single model agree; another name is 404."""
    async with session.get(f"{gateway.url}/v1/models") as response:
        (listed,) = (await response.json())["data"]
    async with session.get(f"{gateway.url}/v1/models/tiny") as response:
        assert await response.json() == listed
    assert (listed["id"], listed["object"], listed["max_model_len"]) == ("tiny", "model", 512)
    assert listed["moe"]["num_experts"] == 8
    async with session.get(f"{gateway.url}/v1/models/a/b") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (
            404,
            "model_not_found",
            "model",
        )


async def test_request_ids_are_echoed_if_sane(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """A sane id comes back, anything else is replaced; errors have one as well."""
    for path, status in (("/version", 200), ("/nothing", 404)):
        for wanted, kept in (("abc-1.2", True), ("a b", False), ("x" * 200, False)):
            headers = {"X-Request-Id": wanted}
            async with session.get(gateway.url + path, headers=headers) as response:
                found = response.headers["X-Request-Id"]
                assert response.status == status
                assert (found == wanted) == kept
                assert found


async def test_unknown_routes_and_methods(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """404 and 405 are envelopes; 405 says what is allowed."""
    async with session.post(f"{gateway.url}/v2/anything", json={}) as response:
        error = (await response.json())["error"]
        assert '"POST /v2/anything"' in error["message"]
        assert (response.status, error["code"], error["type"]) == (
            404,
            "not_found",
            "not_found_error",
        )
    async with session.delete(f"{gateway.url}/v1/models") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_an_unexpected_error_tells_nothing(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug gives an envelope without details; the log has them with the request id."""

    async def broken(request: web.Request) -> web.Response:
        raise ValueError("secret detail")

    def add(app: web.Application) -> None:
        app.router.add_get("/broken", broken)

    async with scripted_gateway(add_routes=add) as gateway:
        headers = {"X-Request-Id": "find-me"}
        with caplog.at_level(logging.ERROR):
            async with session.get(f"{gateway.url}/broken", headers=headers) as response:
                text = await response.text()
                assert response.status == 500
    assert "secret" not in text
    assert '"code":"internal_error"' in text
    assert "find-me" in caplog.text
    assert "secret detail" in caplog.text


async def test_metrics(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Load, requests and expert workers, under our names and under vLLM's."""
    gateway.mesh = BROKEN
    gateway.engine.load = EngineStats(
        num_running=2,
        num_waiting=3,
        kv_blocks_used=5,
        kv_blocks_total=20,
        request_slots_used=2,
        request_slots_total=8,
        num_dropped_pairs=6,
        dispatch=(DispatchStats("w0", calls=4, bytes_out=100, hedges=3, ejections=2, rows_out=7),),
    )
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=2), print, 0.0)
    gateway.metrics.request_started(request, 0.1)
    gateway.metrics.first_token(request, 0.2)
    gateway.metrics.next_token(request, 0.05)
    times = RequestTimes(prefill_s=0.1, decode_s=0.05, num_generated=2, num_cached_tokens=1)
    gateway.metrics.request_timed(request, times)
    gateway.metrics.request_finished(request, FinishReason.LENGTH, 2, 0.3)
    gateway.metrics.step_done(5, 0.1, 0.01)
    async with session.get(f"{gateway.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = set((await response.text()).splitlines())
    model = '{model_name="tiny"}'
    assert {
        f"moe_num_requests_running{model} 2.0",
        f"moe_num_requests_waiting{model} 3.0",
        f"moe_kv_cache_usage_perc{model} 0.25",
        f"moe_kv_blocks_used{model} 5.0",
        f"moe_kv_blocks{model} 20.0",
        f"moe_request_slots_used{model} 2.0",
        f"moe_prompt_tokens_total{model} 3.0",
        f"moe_generation_tokens_total{model} 2.0",
        'moe_request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        f"moe_time_to_first_token_seconds_count{model} 1.0",
        f"moe_e2e_request_latency_seconds_sum{model} 0.3",
        f"moe_request_time_per_output_token_seconds_sum{model} 0.05",
        f"moe_request_params_max_tokens_sum{model} 2.0",
        f"moe_prompt_tokens_cached_total{model} 1.0",
        f"moe_iteration_tokens_sum{model} 5.0",
        'moe_num_requests_waiting_by_reason{model_name="tiny",reason="deferred"} 3.0',
        'moe_num_requests_waiting_by_reason{model_name="tiny",reason="capacity"} 0.0',
        'moe_retries_total{reason="late"} 0.0',
        'moe_dispatch_bytes_total{direction="out",worker="w0"} 100.0',
        'moe_dispatch_hedges_total{worker="w0"} 3.0',
        f"moe_dropped_pairs_total{model} 6.0",
        'moe_dispatch_retries_total{worker="w0"} 0.0',
        'moe_dispatch_ejections_total{worker="w0"} 2.0',
        'moe_workers{state="unreachable"} 1.0',
        'moe_workers{state="draining"} 0.0',
        "moe_uncovered_experts 2.0",
        "moe_placement_version 7.0",
        'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0',
        'vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 5.0',
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 2.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0',
    } <= lines
    assert not any(line.startswith("vllm:kv_blocks_used") for line in lines)


async def test_metrics_in_the_other_format(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """OpenMetrics, as Prometheus asks for it: one end mark, at the end."""
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with session.get(f"{gateway.url}/metrics", headers=headers) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        text = await response.text()
    assert text.count("# EOF") == 1
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {"moe_num_requests_running", "vllm:num_requests_running"} <= names


async def test_ready_follows_the_engine(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """A dead engine is not ready, whatever the mesh says."""
    gateway.engine.load = replace(gateway.engine.load, alive=False)
    async with session.get(f"{gateway.url}/ready") as response:
        assert response.status == 503
