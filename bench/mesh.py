"""Mesh against colocated: `python -m bench.mesh [--model demo-plain] [--meshes 0,1,2,3] ...`.

Serves a model with `expertmesh serve` in each layout, one after the other, lets clients decode, and
prints throughput, latencies, where the time of a step goes, and what went over the wire against the
least that could. All parts of a line are measured in the same run. The clients are this process; it
shares the cores with the servers, as clients on one machine do.

    attention   the forward pass without what follows
    dispatch    packing and sending rows; colocated: the experts themselves
    wait        for expert workers, combine included
    sampling    from the last layer's output to tokens
    gateway     time between steps that is none of these
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.load import Samples, Workload, percentile, read_metrics, run_load
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import ModelConfig
from expertmesh.model_tools.model_size import model_size
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.model_tools.worker_memory import attention_worker_nbytes
from expertmesh.settings import data_home
from tests.support.mesh import Server, serve

SETTLE_S = 1.2
"""Expert workers' counts arrive twice a second."""
COLUMNS = (
    ("mesh", "{:>10}"), ("conc", "{:>5}"), ("tok_s", "{:>8.1f}"), ("ttft_ms", "{:>8.0f}"),
    ("itl_ms", "{:>7.1f}"), ("itl_p99_ms", "{:>10.1f}"), ("step_ms", "{:>8.1f}"),
    ("attention", "{:>9.2f}"), ("dispatch", "{:>8.2f}"), ("wait", "{:>8.2f}"),
    ("sampling", "{:>8.2f}"), ("gateway", "{:>7.2f}"), ("calls/min", "{:>9.2f}"),
    ("rows/min", "{:>8.2f}"), ("bytes/min", "{:>9.3f}"),
)  # fmt: skip
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layout:
    """How a model is served."""

    expert_workers: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.expert_workers) if self.expert_workers else "colocated"


def measure(server: Server, workload: Workload) -> dict[str, float]:
    """One run of the clients: what they saw, and the parts of a step in ms."""
    before = _counted(server)
    seen = run_load(server.api.port, workload)
    time.sleep(SETTLE_S)
    after = _counted(server)
    moved = {key: value - before.get(key, 0.0) for key, value in after.items()}
    num_steps = moved["moe_step_duration_seconds_count", ""]
    parts = {
        name: moved["moe_step_part_seconds_total", part] / num_steps * 1e3
        for name, part in (
            ("attention", "attention"),
            ("dispatch", "dispatch"),
            ("wait", "expert_wait"),
            ("sampling", "sampling"),
        )
    }
    wall_ms = seen.wall_s / num_steps * 1e3
    return {
        **seen.summary(),
        "num_steps": num_steps,
        "step_ms": wall_ms,
        **parts,
        "gateway": wall_ms - sum(parts.values()),
        **_sent(moved),
    }


def _counted(server: Server) -> Samples:
    text = server.api.get("/metrics").body.decode()
    parts = read_metrics(text, "part")
    directions = read_metrics(text, "direction")
    return {**parts, **{key: value for key, value in directions.items() if key[1]}}


def _sent(moved: Samples) -> dict[str, float]:
    """What went to expert workers and came back."""
    return {
        "calls": moved.get(("moe_dispatch_duration_seconds_count", ""), 0.0),
        "rows_out": moved.get(("moe_dispatch_tokens_total", "out"), 0.0),
        "rows_back": moved.get(("moe_dispatch_tokens_total", "back"), 0.0),
        "bytes": moved.get(("moe_dispatch_bytes_total", "out"), 0.0)
        + moved.get(("moe_dispatch_bytes_total", "back"), 0.0),
    }


def against_minimum(
    found: dict[str, float], config: ModelConfig, layout: Layout, workload: Workload, dtype: str
) -> dict[str, float]:
    """Calls, rows and bytes as multiples of the least.

    Calls: a step's rows of a layer in one message to each expert worker, where all are needed.
    Rows: a token's once to each expert worker that has one of its experts, and one back for each
    expert; the first is what chance makes of experts that are chosen evenly. Bytes: of those rows.
    """
    if not found["calls"]:
        return {}
    num_layers, workers = len(config.moe_layers), layout.expert_workers
    top_k = config.moe_ffn(config.moe_layers[0]).gate.top_k
    computed = workload.prompt_len + workload.num_tokens - 1
    num_pairs = computed * workload.num_requests * num_layers * top_k
    least_out = num_pairs / top_k * workers_of_a_row(config.num_experts, top_k, workers)
    row_bytes = config.hidden_size * ITEM_BYTES[dtype]
    return {
        "calls/min": found["calls"] / (found["num_steps"] * num_layers * workers),
        "rows/min": (found["rows_out"] + found["rows_back"]) / (least_out + num_pairs),
        "bytes/min": found["bytes"] / ((found["rows_out"] + found["rows_back"]) * row_bytes),
    }


def workers_of_a_row(num_experts: int, top_k: int, num_workers: int) -> float:
    """Expert workers that a token's experts are on, on average, if chosen evenly."""
    total = 0.0
    for index in range(num_workers):
        own = (index + 1) * num_experts // num_workers - index * num_experts // num_workers
        others = 1.0
        for drawn in range(top_k):
            others *= max(0, num_experts - own - drawn) / (num_experts - drawn)
        total += 1 - others
    return total


def run_layout(
    options: argparse.Namespace, layout: Layout, folder: Path, config: ModelConfig
) -> list[dict[str, float | str]]:
    """Serves once and measures every concurrency; medians of the repeats."""
    dtype = options.dtype if options.dtype != "auto" else config.dtype
    lines = []
    with serve(folder, *layout.flags, expert_workers=layout.expert_workers, dtype=dtype) as server:
        for concurrency in map(int, options.concurrency.split(",")):
            runs = []
            for repeat in range(options.repeat):
                workload = Workload(
                    concurrency,
                    max(2, concurrency),
                    options.prompt_len,
                    options.tokens,
                    config.vocab_size,
                    seed=repeat,
                )
                found = measure(server, workload)
                runs.append(found | against_minimum(found, config, layout, workload, dtype))
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            line: dict[str, float | str] = {"mesh": str(layout), "conc": concurrency, **middle}
            print(format_line(line), flush=True)
            lines.append(line)
        lines.append(memory_beyond_weights(server, layout, config, dtype))
    return lines


def memory_beyond_weights(
    server: Server, layout: Layout, config: ModelConfig, dtype: str
) -> dict[str, float | str]:
    """MB of each kind of process without weights, keys and values that were written included.

    Resident, and each page's share of those that it is shared with.
    """
    size, itemsize = model_size(config), ITEM_BYTES[dtype]
    experts = size.experts.nbytes(itemsize)
    weights = {
        "gateway": 0,
        "attention_worker": attention_worker_nbytes(config, size, itemsize)
        + (0 if layout.expert_workers else experts),
        "expert_worker": experts // max(1, layout.expert_workers),
    }
    found: dict[str, float | str] = {"mesh": str(layout)}
    for process in server.process.descendants():
        for module in weights.keys() & set(process.cmdline()):
            memory = process.memory_full_info()
            found[f"{module}_rss_mb"] = round((memory.rss - weights[module]) / 1e6)
            found[f"{module}_pss_mb"] = round((memory.pss - weights[module]) / 1e6)
    shown = ", ".join(f"{name} {value}" for name, value in found.items() if name != "mesh")
    print(f"{layout!s:>10}  memory beyond weights: {shown}", flush=True)
    return found


def format_line(line: dict[str, float | str]) -> str:
    """A line of the table; what does not apply is left out."""
    cells = []
    for name, shape in COLUMNS:
        width = int(shape.split(">")[1].rstrip("}f").split(".")[0])
        cells.append(shape.format(line[name]) if name in line else " " * (width - 1) + "-")
    return " ".join(cells)


def header() -> str:
    """Names of the columns."""
    widths = [int(shape.split(">")[1].rstrip("}f").split(".")[0]) for _, shape in COLUMNS]
    return " ".join(f"{name:>{width}}" for (name, _), width in zip(COLUMNS, widths, strict=True))


def first_and_tenth(
    options: argparse.Namespace, layout: Layout, folder: Path, config: ModelConfig
) -> dict[str, float | str]:
    """Time to the first token of requests 1 to 10 after a start, one after the other, in ms."""
    dtype = options.dtype if options.dtype != "auto" else config.dtype
    with serve(folder, *layout.flags, expert_workers=layout.expert_workers, dtype=dtype) as server:
        times = []
        for number in range(10):
            workload = Workload(1, 1, options.prompt_len, 4, config.vocab_size, seed=number)
            times.append(run_load(server.api.port, workload).first_s[0] * 1e3)
    middle = statistics.median(times[1:])
    print(
        f"{layout!s:>10}  time to first token: request 1 {times[0]:.0f} ms, 2 {times[1]:.0f} ms, "
        f"10 {times[9]:.0f} ms; median of 2 to 10 {middle:.0f} ms, longest "
        f"{percentile(times[1:], 1.0):.0f} ms",
        flush=True,
    )
    return {"mesh": str(layout), "first_ms": times[0], "tenth_ms": times[9], "median_ms": middle}


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.mesh", description=__doc__)
    parser.add_argument("--model", default="demo-plain", help="checkpoint folder or demo name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--meshes", default="0,1,2,3", help="expert workers; 0: colocated")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags of serve, separated by spaces")
    parser.add_argument("--first", action="store_true", help="compare requests 1 and 10 instead")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def main() -> int:
    """Prints a table; writes JSON if asked to."""
    options = parse_options()
    folder = resolve_model(options.model, data_home(), NoProgress())
    config = Checkpoint.open(folder).config
    results: list[dict[str, float | str]] = []
    if not options.first:
        print(f"{options.model}: ms per step, medians of {options.repeat}\n{header()}", flush=True)
    for count in map(int, options.meshes.split(",")):
        layout = Layout(count, tuple(options.flags.split()))
        if options.first:
            results.append(first_and_tenth(options, layout, folder, config))
        else:
            results += run_layout(options, layout, folder, config)
    if options.json:
        options.json.write_text(
            json.dumps(
                {"options": vars(options) | {"json": ""}, "results": results}, indent=1, default=str
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
