"""What a step costs as things grow: `python -m bench.scale [--parts delay,workers,...] ...`.

Tiny models, so that what is measured is not the arithmetic of experts but all the rest. A step of
decoding costs, by the model of a split that does one thing after the other,

    step = layers * (attention + 2 * delay + experts + messages * cost of a message)

so that a delay must show twice a layer, and a message what its packing, sending and taking cost.
Parts: `delay` of a simulated network, 0 to 1 ms each way; `workers`, 1 to 16 expert workers on the
same cores; `layers`, `experts`, `rows` (requests at a time), `context` (tokens before the answer).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.delay_proxy import HOST, delayed
from bench.load import Workload
from bench.mesh import measure
from tests.support.mesh import ExpertProcess, Server, expert_workers, gateway
from tests.support.tiny_checkpoints import TinyShape, save_tiny

BASE = TinyShape(
    num_layers=8,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    num_experts=16,
    vocab_size=512,
    max_positions=4096,
    dtype="bfloat16",
)
FLAGS = ("--kv-cache-tokens", "40000", "--max-num-seqs", "64")


@dataclass(frozen=True)
class Point:
    """One measurement."""

    part: str
    value: int
    step_ms: float
    """Median time between two tokens of an answer."""
    attention_ms: float
    wait_ms: float
    calls: float
    """Messages of a step."""


class Bench:
    """Models and meshes of the benchmark."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self.points: list[Point] = []

    def model(self, shape: TinyShape) -> Path:
        """A checkpoint of this shape."""
        path = self._folder / f"model-{abs(hash(shape)):x}"
        return path if path.exists() else save_tiny(path, shape)

    @contextmanager
    def mesh(
        self, shape: TinyShape, num_workers: int, delay_us: int | None = None
    ) -> Iterator[Server]:
        """A gateway and its expert workers, behind a delay if one is given (0: a proxy only)."""
        model = self.model(shape)
        shares = [f"{index}/{num_workers}" for index in range(num_workers)]
        with ExitStack() as stack:
            workers = stack.enter_context(expert_workers(model, shares, dtype="bfloat16"))
            addresses = [worker.address for worker in workers]
            if delay_us is not None:
                stack.enter_context(delayed(_ports(workers), delay_us))
                addresses = [f"{HOST}:{worker.port}" for worker in workers]
            yield stack.enter_context(gateway(model, addresses, *FLAGS, dtype="bfloat16"))

    def measure(
        self, server: Server, part: str, value: int, rows: int = 8, context: int = 16
    ) -> Point:
        """A median of runs in which so many requests decode at a time."""
        runs = []
        for repeat in range(self._options.repeat):
            workload = Workload(
                rows, rows, context, self._options.tokens, BASE.vocab_size, seed=repeat
            )
            runs.append(measure(server, workload))
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        calls = middle["calls"] / middle["num_steps"]
        point = Point(part, value, middle["itl_ms"], middle["attention"], middle["wait"], calls)
        self.points.append(point)
        return point


def _ports(workers: Sequence[ExpertProcess]) -> list[int]:
    """All that they listen on."""
    found = {
        connection.laddr.port
        for worker in workers
        for connection in psutil.Process(worker.process.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


def by_delay(bench: Bench) -> None:
    """One way, in us; the model: each layer waits for it twice."""
    base = 0.0
    for delay_us in (0, 100, 250, 500, 1000):
        with bench.mesh(BASE, 2, delay_us) as server:
            point = bench.measure(server, "delay", delay_us)
        base = base or point.step_ms
        model = base + 2 * delay_us / 1e3 * BASE.num_layers
        _tell(point, f"model {model:.2f} ms, measured / model {point.step_ms / model:.3f}")


def by_workers(bench: Bench) -> None:
    """Expert workers that share the cores; the model: a message costs the same however many."""
    first: Point | None = None
    for count in (1, 2, 4, 8, 16):
        with bench.mesh(BASE, count) as server:
            point = bench.measure(server, "workers", count)
        first = first or point
        more = point.calls - first.calls
        cost = (point.step_ms - first.step_ms) / more * 1e3 if more > 0.5 else 0.0
        _tell(point, f"a further message costs {cost:.0f} us" if cost else "")


def by_layers(bench: Bench) -> None:
    """Layers of a model, with two expert workers."""
    _by_shape(bench, "layers", (4, 8, 16, 32), lambda value: replace(BASE, num_layers=value))


def by_experts(bench: Bench) -> None:
    """Experts of a layer, of which two are chosen, on two expert workers."""
    _by_shape(bench, "experts", (4, 16, 64), lambda value: replace(BASE, num_experts=value))


def _by_shape(
    bench: Bench, part: str, values: Sequence[int], shape_of: Callable[[int], TinyShape]
) -> None:
    for value in values:
        shape = shape_of(value)
        with bench.mesh(shape, 2) as server:
            point = bench.measure(server, part, value)
        _tell(point, f"{point.step_ms / shape.num_layers * 1e3:.0f} us a layer")


def by_rows(bench: Bench) -> None:
    """Requests that decode at a time."""
    with bench.mesh(BASE, 2) as server:
        for rows in (1, 4, 16, 64):
            point = bench.measure(server, "rows", rows, rows=rows)
            _tell(point, f"{point.step_ms / rows * 1e3:.0f} us a row")


def by_context(bench: Bench) -> None:
    """Tokens before the answer; attention alone may grow."""
    with bench.mesh(BASE, 2) as server:
        for context in (16, 256, 1024, 3500):
            _tell(bench.measure(server, "context", context, context=context))


def _tell(point: Point, remark: str = "") -> None:
    print(
        f"{point.part:<8}{point.value:>6}{point.step_ms:>10.2f}{point.attention_ms:>11.2f}"
        f"{point.wait_ms:>8.2f}{point.calls:>8.1f}   {remark}",
        flush=True,
    )


PARTS: dict[str, Callable[[Bench], None]] = {
    "delay": by_delay,
    "workers": by_workers,
    "layers": by_layers,
    "experts": by_experts,
    "rows": by_rows,
    "context": by_context,
}


def main() -> int:
    """Prints a table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    print(f"{'part':<8}{'value':>6}{'step ms':>10}{'attention':>11}{'wait':>8}{'calls':>8}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        for part in options.parts.split(","):
            PARTS[part](bench)
    if options.json:
        options.json.write_text(json.dumps([vars(point) for point in bench.points], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
