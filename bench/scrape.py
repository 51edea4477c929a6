"""What a scrape costs the event loop: the longest time for which nothing else was served.

    python -m bench.scrape [--layers 61] [--experts 256] [--workers 16] [--scrapes 40]

A task sleeps for no time at all, again and again, and notes how long that took, by the clock and in
processor time; meanwhile a client in another process scrapes. What it notes without any scrape is
told, too: it is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import numpy as np
from prometheus_client import CollectorRegistry

from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from gateway.app import build_app
from gateway.http_connections import make_runner
from gateway.listen import bind
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.reception import Reception
from gateway.request_metrics import RequestMetrics
from gateway.sequence import DispatchStats, EngineStats
from gateway.service import ApiLimits, GenerationFrontend
from gateway.telemetry.collector import TelemetryCollector
from gateway.telemetry.sources import ModelExperts, Sources
from gateway.telemetry.telemetry import Telemetry
from tests.support.scripted_engine import ScriptedEngine, served_model

PATHS = ("/metrics", "/metrics/experts", "/v1/moe/experts?window=60", "/v1/moe/workers")
_CLIENT = """
import sys, time, urllib.request
print(flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    size = len(urllib.request.urlopen(sys.argv[1]).read())
    print(time.perf_counter() - begun, size, flush=True)
"""
_QUIET_S = 0.05
"""How long nothing is asked for, to see what the machine alone does."""


def large_mesh(num_layers: int, num_experts: int, num_workers: int) -> Sources:
    """Expert workers with an equal share each, and counts of all experts."""
    layers, random = tuple(range(num_layers)), np.random.default_rng(1)
    rows_LE = random.integers(0, 10**7, (num_layers, num_experts))
    names = [f"expert-worker-{index}" for index in range(num_workers)]
    entries = tuple(
        ExpertWorkerEntry(
            name,
            f"{name}:50052",
            1,
            dict.fromkeys(layers, tuple(range(at, num_experts, num_workers))),
        )
        for at, name in enumerate(names)
    )
    expert_map = ExpertMap(1, layers, num_experts, entries)
    expert_map.prepare()
    dispatch = tuple(DispatchStats(name, 900, rows_out=9999, round_trip_s=3.0) for name in names)
    workers = tuple(
        ExpertWorkerStatus(name, f"{name}:50052", ExpertWorkerState.READY) for name in names
    )
    return Sources(
        experts=ModelExperts(layers, num_experts, 8),
        gate_rows=lambda: rows_LE + random.integers(0, 9, rows_LE.shape),
        expert_map=lambda: expert_map,
        mesh=lambda: MeshStatus(1, workers),
        stats=lambda: EngineStats(dispatch=dispatch),
    )


Turn = tuple[float, float]
"""Milliseconds of one turn of the event loop: by the clock, and of processor time."""


async def _turns(until: asyncio.Event) -> list[Turn]:
    """All turns until the event is set."""
    turns = []
    while not until.is_set():
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0)
        took_s, cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
        turns.append((took_s * 1e3, cpu_s * 1e3))
    return turns


class _Client:
    """A process that asks for a URL when it is told to."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str) -> _Client:
        """Returns once it waits to be told."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CLIENT, url), stdin=pipe, stdout=pipe
        )
        client = cls(process)
        await client._line()
        return client

    async def ask(self) -> list[float]:
        """Seconds and bytes of an answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return [float(word) for word in (await self._line()).split()]

    async def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


async def _measure(client: _Client | None) -> tuple[list[Turn], list[float]]:
    """Turns of the event loop, and seconds and bytes of an answer."""
    done = asyncio.Event()
    turns = asyncio.create_task(_turns(done))
    answer: list[float] = []
    if client is None:
        await asyncio.sleep(_QUIET_S)
    else:
        answer = await client.ask()
    done.set()
    return await turns, answer


async def _run(options: argparse.Namespace) -> None:
    sources = large_mesh(options.layers, options.experts, options.workers)
    telemetry, registry = Telemetry(sources), CollectorRegistry()
    metrics = RequestMetrics(registry, "a-model")
    metrics.watch(sources.stats, sources.mesh)
    registry.register(TelemetryCollector(telemetry))
    model, limits = served_model(tokenizer=True), ApiLimits()
    frontend = GenerationFrontend(ScriptedEngine(model.tokenizer), model, sources.mesh, limits)
    runner = make_runner(build_app(frontend, registry, telemetry=telemetry), limits, stop_s=1.0)
    await runner.setup()
    bound = bind("--port", "127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    await Reception(runner, bound, registry).start()
    telemetry.start()
    print(f"{options.layers} layers x {options.experts} experts, {options.workers} expert workers")
    print(f"{'':29}{'longest turn of the loop, ms':^40}{'answer':>22}")
    print(f"{'':29}{'clock p50':>10}{'p95':>10}{'CPU p50':>10}{'p95':>10}{'ms':>12}{'KiB':>10}")
    try:
        for path in (None, *PATHS):
            client = None if path is None else await _Client.start(url + path)
            rounds = [await _measure(client) for _ in range(options.scrapes)]
            print(f"{path or 'nothing':28} {_summary(rounds)}")
            if client is not None:
                await client.stop()
    finally:
        telemetry.stop()
        frontend.close()
        await runner.cleanup()


def _summary(rounds: list[tuple[list[Turn], list[float]]]) -> str:
    longest = np.array([np.max(turns, axis=0) for turns, _ in rounds])
    line = "".join(f"{value:10.2f}" for value in np.quantile(longest, (0.5, 0.95), axis=0).T.flat)
    answers = [answer for _, answer in rounds if answer]
    if not answers:
        return line
    seconds, sizes = zip(*answers, strict=True)
    return line + f"{statistics.median(seconds) * 1e3:12.1f}{sizes[0] / 1024:10.0f}"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 61), ("experts", 256), ("workers", 16), ("scrapes", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
