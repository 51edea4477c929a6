"""What the gateway adds to a step: `python -m bench.gateway_overhead [--expert-workers 2] ...`.

Many streams decode at the same time. Time between committed steps, minus the time that the
attention worker reports for computing them, is what scheduling, streams between the processes,
detokenization and the HTTP API cost. Both are measured in the same run, so noise of the machine
hits both. The clients are a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar
from unittest import mock

import aiohttp

from expertmesh.settings import (
    EngineSettings,
    GatewaySettings,
    HttpSettings,
    LogSettings,
    MeshSettings,
    ModelSettings,
)
from gateway import server
from gateway.request_metrics import RequestMetrics
from gateway.server import Gateway
from tests.support.engine_bench import wait_for
from tests.support.mesh import expert_workers

SKIPPED = 4
"""Steps at the beginning and at the end of steady decoding that do not count."""


class StepTimes(RequestMetrics):
    """Metrics that remember every step."""

    steps: ClassVar[list[tuple[float, int, float]]] = []
    """(when it was committed, tokens, seconds of computing)"""

    def step_done(self, num_tokens: int, duration_s: float, expert_wait_s: float) -> None:
        """A step was committed."""
        self.steps.append((time.monotonic(), num_tokens, duration_s))
        super().step_done(num_tokens, duration_s, expert_wait_s)


def overhead(steps: Sequence[tuple[float, int, float]], num_rows: int) -> tuple[float, float, int]:
    """Of the steps in which every request decodes: median step time, overhead, and how many."""
    steady = [step for step in steps if step[1] == num_rows][SKIPPED:-SKIPPED]
    walls = [later[0] - sooner[0] for sooner, later in itertools.pairwise(steady)]
    compute = [step[2] for step in steady[1:]]
    return statistics.median(compute), (sum(walls) - sum(compute)) / sum(compute), len(walls)


async def one_stream(session: aiohttp.ClientSession, number: int, max_tokens: int) -> None:
    """Reads one streamed chat to its end."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me a story with the number {number}."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content:
            pass


async def clients(port: int, num_streams: int, max_tokens: int) -> None:
    """All streams at once."""
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await asyncio.gather(
            *(one_stream(session, number, max_tokens) for number in range(num_streams))
        )


async def measure(options: argparse.Namespace, experts: str, depth: int) -> list[float]:
    """Serves, lets the clients run several times, prints each result; returns the overheads."""
    settings = GatewaySettings(
        http=HttpSettings(port=0, grpc_port=0),
        model=ModelSettings(model=options.model),
        engine=EngineSettings(
            kv_cache_tokens=16_384, async_scheduling=depth > 1, max_num_seqs=options.streams
        ),
        mesh=MeshSettings(experts=experts),
        log=LogSettings(log_level="warning"),
    )
    gateway, found = Gateway(settings), []
    try:
        await gateway.start()
        await asyncio.to_thread(wait_for, lambda: gateway.mesh().ready)
        for _ in range(options.repeat):
            StepTimes.steps.clear()
            await _run_clients(int(str(gateway.info["http_port"])), options)
            step_s, share, num_steps = overhead(StepTimes.steps, options.streams)
            found.append(share)
            print(
                f"{experts if experts == 'local' else 'expert workers':<16}{depth:>9}"
                f"{num_steps:>7}{step_s * 1000:>12.1f}{share * 100:>10.2f} %",
                flush=True,
            )
    finally:
        await gateway.stop()
    return found


async def _run_clients(port: int, options: argparse.Namespace) -> None:
    argv = ["-m", "bench.gateway_overhead", "--clients-of", str(port)]
    argv += ["--streams", str(options.streams), "--tokens", str(options.tokens)]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv)
    assert await process.wait() == 0


@contextmanager
def experts_of(options: argparse.Namespace) -> Iterator[str]:
    """Where the experts are: addresses of expert workers, or local."""
    with ExitStack() as stack:
        num = options.expert_workers
        shares = [f"{index}/{num}" for index in range(num)]
        workers = stack.enter_context(expert_workers(options.model, shares, dtype="auto"))
        yield ",".join(worker.address for worker in workers) if workers else "local"


def main() -> int:
    """Prints a line for each run, and the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--expert-workers", type=int, default=0, help="0: in the same process")
    parser.add_argument("--depths", default="2,1", help="steps in flight, one after the other")
    parser.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients_of:
        asyncio.run(clients(options.clients_of, options.streams, options.tokens))
        return 0
    print(f"{'experts':<16}{'in flight':>9}{'steps':>7}{'step in ms':>12}{'overhead':>12}")
    medians = {}
    with experts_of(options) as experts:
        for depth in map(int, options.depths.split(",")):
            medians[depth] = statistics.median(asyncio.run(measure(options, experts, depth)))
    print(json.dumps({f"{depth} in flight": round(share, 4) for depth, share in medians.items()}))
    return 0


if __name__ == "__main__":
    with mock.patch.object(server, "RequestMetrics", StepTimes):
        sys.exit(main())
