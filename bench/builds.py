"""Two builds against each other: `python -m bench.builds BEFORE AFTER [--model demo-plain] ...`.

Each is a folder with a checkout. Both serve the same model with `expertmesh serve`; clients ask
them in turns, the other one being idle meanwhile, so that what the machine does besides meets both.
What is compared are the tokens per second of neighbouring turns.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.load import Workload, run_load
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.settings import data_home
from tests.support.mesh import Server, serve


def main() -> None:
    """Command line."""
    options = _options()
    folder = resolve_model(options.model, data_home(), NoProgress())
    vocab_size = Checkpoint.open(folder).config.vocab_size
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serve(folder, expert_workers=options.expert_workers, dtype=options.dtype, env=env)
            )
            for env in (_environment(options.before), _environment(options.after))
        ]
        print("conc  turns   before    after   after/before: median   least    most")
        for concurrency in options.concurrency:
            workload = Workload(
                concurrency=concurrency,
                num_requests=concurrency,
                prompt_len=options.prompt_len,
                num_tokens=options.num_tokens,
                vocab_size=vocab_size,
            )
            _print_line(workload, _rates(servers, workload, options.turns))


def _rates(servers: list[Server], workload: Workload, turns: int) -> list[list[float]]:
    """Tokens per second of each turn, of each server; the first turn is not counted."""
    rates: list[list[float]] = [[] for _ in servers]
    for turn in range(turns + 1):
        order = range(len(servers)) if turn % 2 else reversed(range(len(servers)))
        for index in order:
            asked = replace(workload, seed=turn)
            rates[index].append(run_load(servers[index].api.port, asked).summary()["tok_s"])
    return [of_server[1:] for of_server in rates]


def _print_line(workload: Workload, rates: list[list[float]]) -> None:
    before, after = rates
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    print(
        f"{workload.concurrency:>4} {len(ratios):>6} {statistics.median(before):>8.1f}"
        f" {statistics.median(after):>8.1f} {statistics.median(ratios):>22.3f}"
        f" {min(ratios):>7.3f} {max(ratios):>7.3f}",
        flush=True,
    )


def _environment(checkout: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{checkout}:{checkout / 'kernels'}"}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="demo-plain")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--expert-workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
