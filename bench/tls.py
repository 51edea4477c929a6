"""What certificates between gateway and expert workers cost: `python -m bench.tls [--turns N] ...`.

Serves a model with two expert workers three times side by side: rows over direct connections, as it
is without certificates; over gRPC, as it is with them, but in plain text; and over gRPC with mutual
TLS. So what gRPC costs and what encryption costs are told apart. The meshes take turns, each time
in another order, while the others idle. Columns: tokens/s in the median of all turns; what that is
of the first mesh's and of the one before, as the median of what it was in each turn; ms a step, and
of these what the attention worker spends on sending rows and on waiting for them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.load import Workload
from bench.mesh import measure
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.settings import data_home
from tests.support.certificates import Authority, mesh_flags
from tests.support.mesh import Server, expert_workers, gateway

DIRECT, GRPC, TLS = "direct connections", "gRPC", "gRPC, mutual TLS"
SHARES = ("0/2", "1/2")
NO_DIRECT = ("--direct-port", "-1")
HEADER = "rows travel by       clients   tok/s of direct of the last  step ms  dispatch    wait"
Found = dict[str, float]


@contextmanager
def meshes(folder: Path, dtype: str) -> Iterator[dict[str, Server]]:
    """The three of them, warm."""
    with tempfile.TemporaryDirectory() as tls, ExitStack() as stack:
        certificates = mesh_flags(Authority.new().issue(Path(tls)))
        servers = {}
        for name, own, of_workers in (
            (DIRECT, (), ()),
            (GRPC, (), NO_DIRECT),
            (TLS, certificates, certificates),
        ):
            flags = ("--threads", "1", *of_workers)
            workers = expert_workers(folder, SHARES, dtype=dtype, flags=flags)
            addresses = [each.address for each in stack.enter_context(workers)]
            server = stack.enter_context(gateway(folder, addresses, *own, dtype=dtype))
            servers[name] = server
        yield servers


def take_turns(
    servers: Mapping[str, Server], workloads: Sequence[Workload]
) -> dict[str, list[Found]]:
    """One line for each workload and mesh."""
    found: dict[str, list[Found]] = {name: [] for name in servers}
    names = list(servers)
    for number, workload in enumerate(workloads):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(measure(servers[name], workload))
    return found


def show(found: Mapping[str, Sequence[Found]], num_clients: int) -> None:
    """Prints a line for each mesh."""
    before = DIRECT
    for name, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{name:<20}{num_clients:>8}{middle['tok_s']:>8.1f}"
            f"{ratio(runs, found[DIRECT]):>10.3f}{ratio(runs, found[before]):>12.3f}"
            f"{middle['step_ms']:>9.2f}{middle['dispatch']:>10.2f}{middle['wait']:>8.2f}",
            flush=True,
        )
        before = name


def ratio(runs: Sequence[Found], others: Sequence[Found]) -> float:
    """Of tokens per second in the same turn, in the median."""
    pairs = zip(runs, others, strict=True)
    return statistics.median(run["tok_s"] / other["tok_s"] for run, other in pairs)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.tls", description=__doc__)
    parser.add_argument("--model", default="demo", help="checkpoint folder or demo name")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=6)
    return parser.parse_args()


def main() -> int:
    """Prints a table."""
    options = parse_options()
    folder = resolve_model(options.model, data_home(), NoProgress())
    vocab_size = Checkpoint.open(folder).config.vocab_size
    with meshes(folder, options.dtype) as servers:
        print(
            "rows travel by       clients   tok/s  of direct  of the last   step  dispatch    wait"
        )
        for num_clients in map(int, options.concurrency.split(",")):
            workloads = [
                Workload(
                    *(num_clients, max(2, num_clients), options.prompt_len, options.tokens),
                    vocab_size,
                    seed=turn,
                )
                for turn in range(options.turns + 1)
            ]
            take_turns(servers, workloads[:1])  # pages, caches, fitted times
            show(take_turns(servers, workloads[1:]), num_clients)
    return 0


if __name__ == "__main__":
    sys.exit(main())
