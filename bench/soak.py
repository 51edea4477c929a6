"""Does a server under full load keep its size? `python -m bench.soak --minutes 30`.

Requests of every kind, with prompts that were never seen before and clients that go away, are sent
without a pause. Memory, file descriptors and threads of every process of the mesh, KV blocks and
the queue are sampled. Exit code 1 if memory, descriptors or threads still grow after the warm-up,
if something is held once the load is gone, or if a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from tests.support.api import Api
from tests.support.mesh import serve
from tests.support.mixed_load import ask, client, mixed_request
from tests.support.tiny_checkpoints import MIXTRAL_TEXT, save_tiny

MAX_MIB_PER_HOUR = 12.0
"""Growth of a process after the warm-up that is taken for noise of the allocator."""
MAX_DRIFT = 4
"""Difference of descriptors or threads between the warm-up and the end."""


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_mib: float
    num_fds: int
    num_threads: int


class Watch:
    """Samples of all processes of a mesh."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self.samples: dict[int, list[Sample]] = {}
        self.names: dict[int, str] = {}

    def sample(self, at_s: float) -> None:
        """Looks at each process once."""
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                with process.oneshot():
                    found = Sample(
                        at_s,
                        process.memory_info().rss / 2**20,
                        process.num_fds(),
                        process.num_threads(),
                    )
                    self.names.setdefault(process.pid, _name(process.cmdline()))
            except psutil.Error:
                continue
            self.samples.setdefault(process.pid, []).append(found)

    def report(self, warmup_s: float) -> list[str]:
        """Prints a table; returns what grows."""
        print(f"\n{'process':<24}{'MiB':>14}{'MiB/h':>9}{'descriptors':>13}{'threads':>11}")
        problems = []
        for pid, samples in self.samples.items():
            steady = [sample for sample in samples if sample.at_s >= warmup_s]
            if len(steady) < 4:
                problems.append(f"{self.names[pid]} {pid} did not live through the test")
                continue
            first, last = steady[0], samples[-1]
            growth = slope_per_hour(steady)
            print(
                f"{self.names[pid]:<24}{first.rss_mib:>6.0f} ->{last.rss_mib:>5.0f}{growth:>9.1f}"
                f"{first.num_fds:>6} ->{last.num_fds:>4}{first.num_threads:>5} ->"
                f"{last.num_threads:>3}"
            )
            if growth > MAX_MIB_PER_HOUR:
                problems.append(f"{self.names[pid]} grows by {growth:.1f} MiB/h")
            if last.num_fds - first.num_fds > MAX_DRIFT:
                problems.append(f"{self.names[pid]} leaks descriptors")
            if last.num_threads - first.num_threads > MAX_DRIFT:
                problems.append(f"{self.names[pid]} leaks threads")
        return problems


def slope_per_hour(samples: Sequence[Sample]) -> float:
    """MiB per hour: the median of the slopes of all pairs, which single spikes do not move."""
    times = np.array([sample.at_s for sample in samples])
    sizes = np.array([sample.rss_mib for sample in samples])
    later, earlier = np.tril_indices(len(times), -1)
    slopes = (sizes[later] - sizes[earlier]) / (times[later] - times[earlier])
    return float(np.median(slopes)) * 3600


def _name(command: Sequence[str]) -> str:
    """The module that a process runs; the first one runs the command line."""
    return command[command.index("-m") + 1] if "-m" in command else "serve"


async def load(port: int, until_s: float, concurrency: int, outcomes: Counter[str]) -> None:
    """Keeps this many requests open."""
    numbers = itertools.count()

    async def one_client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until_s:
            request = mixed_request(next(numbers))
            try:
                outcome = await ask(session, request)
            except (aiohttp.ClientError, TimeoutError) as error:
                outcomes[f"failed: {error!r}"] += 1
                continue
            left = request.leaves_after is not None
            outcomes[outcome.error or ("abandoned" if left else "done")] += 1

    async with client(port) as session:
        await asyncio.gather(*(one_client(session) for _ in range(concurrency)))


async def watch(api: Api, processes: Watch, until_s: float, every_s: float) -> None:
    """Samples until the end, and prints a line each time."""
    started = time.monotonic()
    print(
        f"{'minute':>6}{'MiB in all':>12}{'running':>9}{'waiting':>9}{'KV blocks':>11}", flush=True
    )
    while time.monotonic() < until_s:
        await asyncio.sleep(every_s)
        at_s = time.monotonic() - started
        processes.sample(at_s)
        latest = [samples[-1] for samples in processes.samples.values()]
        metrics = await asyncio.to_thread(api.metrics)
        print(
            f"{at_s / 60:>6.1f}{sum(sample.rss_mib for sample in latest):>12.0f}"
            f"{metrics['moe_num_requests_running']:>9.0f}"
            f"{metrics['moe_num_requests_waiting']:>9.0f}"
            f"{metrics['moe_kv_blocks_used']:>11.0f}",
            flush=True,
        )


async def soak(api: Api, processes: Watch, options: argparse.Namespace) -> list[str]:
    """Loads and watches; returns what is wrong."""
    until_s = time.monotonic() + options.minutes * 60
    outcomes: Counter[str] = Counter()
    await asyncio.gather(
        load(api.port, until_s, options.concurrency, outcomes),
        watch(api, processes, until_s, options.every_s),
    )
    await asyncio.sleep(2.0)
    metrics = await asyncio.to_thread(api.metrics)
    problems = processes.report(options.minutes * 60 * options.warmup)
    print(f"\nrequests: {dict(outcomes)}")
    problems += [text for text in outcomes if text not in ("done", "abandoned")]
    for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
        if metrics[f"moe_{name}"]:
            problems.append(f"{name} is {metrics[f'moe_{name}']:.0f} at the end")
    return problems


@contextmanager
def served(options: argparse.Namespace) -> Iterator[tuple[Api, psutil.Process]]:
    """The server at --pid and --port, or one of a tiny model."""
    if options.pid:
        yield Api(options.port), psutil.Process(options.pid)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "tiny", MIXTRAL_TEXT, tokenizer=True)
        flags = ("--kv-cache-tokens", "2048", "--max-num-seqs", "24")
        with serve(model, *flags) as server:
            yield server.api, psutil.Process(server.process.process.pid)


def main() -> int:
    """Runs it; the exit code says whether something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warmup", type=float, default=0.4, help="share of the time")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--every-s", type=float, default=15.0, help="between two samples")
    parser.add_argument("--pid", type=int, help="of `expertmesh serve` that runs already")
    parser.add_argument("--port", type=int, default=8000, help="of its HTTP API")
    options = parser.parse_args()
    with served(options) as (api, root):
        problems = asyncio.run(soak(api, Watch(root), options))
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "OK: nothing grows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
