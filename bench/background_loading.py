"""What loading in the background does to calls: `python -m bench.background_loading [--rows 1,16]`.

One expert worker answers calls over a direct connection, one after the other, for experts that
stay, in turns of a few seconds: undisturbed, and while a leader has other experts loaded and
unloaded all the time. Both in one run, so that noise of the machine hits both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import torch

from attention_worker.experts import RemoteExperts
from expertmesh.checkpoint import Checkpoint
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from expertmesh_kernels.router import Routing
from tests.support.mesh import watch_once
from tests.support.processes import Managed, poll
from tests.support.tiny_checkpoints import TinyShape, save_tiny

SHAPE = TinyShape(
    num_layers=2, hidden_size=768, num_heads=12, head_dim=64, intermediate_size=1536,
    num_experts=16, dtype="bfloat16",
)  # fmt: skip
ASKED = range(4)
"""Experts of layer 0 that calls are for."""
MOVED = [(1, expert) for expert in range(16)]
TIMEOUT_S = 30.0


@dataclass
class Times:
    """Of calls, and what was loaded meanwhile."""

    calls_s: list[float] = field(default_factory=list)
    num_loaded: int = 0
    took_s: float = 0.0

    def line(self, name: str) -> str:
        """For the table."""
        p50, p99, p999 = np.quantile(self.calls_s, [0.5, 0.99, 0.999]) * 1e3
        return (
            f"{name:22} {len(self.calls_s):7} {p50:8.3f} {p99:8.3f} {p999:8.3f} "
            f"{max(self.calls_s) * 1e3:8.2f} {self.num_loaded / self.took_s:8.1f}"
        )


class Mover:
    """Has experts loaded and unloaded, in a thread, while it is entered."""

    def __init__(self, stub: rpc.ExpertServiceStub, incarnation: int) -> None:
        self._stub = stub
        self._incarnation = incarnation
        self.num_loaded = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context in which experts move."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._run, args=(is_over,), name="mover")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(TIMEOUT_S)

    def _run(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            for key in MOVED:
                if not is_over.is_set():
                    self._load(*key)
            experts = [pb.ExpertId(layer=layer, expert=expert) for layer, expert in MOVED]
            unload = pb.UnloadExpertsRequest(incarnation=self._incarnation, experts=experts)
            list(self._stub.UnloadExperts(unload, timeout=TIMEOUT_S))

    def _load(self, layer: int, expert: int) -> None:
        experts = [pb.ExpertId(layer=layer, expert=expert)]
        load = pb.LoadExpertsRequest(incarnation=self._incarnation, experts=experts)
        *_, last = self._stub.LoadExperts(load, timeout=TIMEOUT_S)
        assert last.state == pb.EXPERT_STATE_RESIDENT, last
        self.num_loaded += 1


class Caller:
    """Calls for a number of rows."""

    def __init__(self, experts: RemoteExperts, num_rows: int) -> None:
        rng = np.random.default_rng(0)
        x_RH = rng.standard_normal((num_rows, SHAPE.hidden_size), dtype=np.float32)
        ids_RK = np.stack([rng.permutation(len(ASKED))[: SHAPE.top_k] for _ in range(num_rows)])
        weights_RK = rng.random((num_rows, SHAPE.top_k), dtype=np.float32)
        self._experts = experts
        self._x_RH = torch.from_numpy(x_RH).to(torch.bfloat16)
        ids_RK = np.ascontiguousarray(ids_RK.astype(np.int32))
        self._routing = Routing.of(ids_RK, weights_RK, SHAPE.num_experts)
        self._num_rows = num_rows

    def run(self, seconds: float, times: Times) -> None:
        """Calls one after the other."""
        ends_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < ends_s:
            deadline_s = time.monotonic() + TIMEOUT_S
            self._experts.dispatch(
                0, self._x_RH, self._routing, self._num_rows, deadline_s
            ).result()
            times.calls_s.append(time.perf_counter() - began_s)
        times.took_s += seconds


@contextmanager
def client(checkpoint: Checkpoint, address: str) -> Iterator[RemoteExperts]:
    """An attention worker's side, with a direct connection."""
    state = watch_once(address)
    resident = {layer.layer: tuple(layer.resident) for layer in state.layers}
    entry = ExpertWorkerEntry(
        state.worker_id, address, state.incarnation, resident, state.row_credits
    )
    experts = RemoteExperts(checkpoint.config, checkpoint.fingerprint, "bfloat16")
    experts.warm_up()
    try:
        experts.update_map(ExpertMap.empty(checkpoint.config).replaced([entry]), gateway=1)
        experts.begin_step(1)
        streams = experts._routes.streams
        poll(lambda: all(s.usable and s.interest[0] >= 0 for s in streams), timeout_s=TIMEOUT_S,
             what="a direct connection")  # fmt: skip
        yield experts
    finally:
        experts.close()


def measure(folder: Path, rows: list[int], turns: int, seconds: float, flags: list[str]) -> None:
    """Prints the table."""
    argv = ["-m", "expert_worker", str(folder), "--port", "0", "--experts", "0-3", *flags]
    with Managed(argv, name="expert worker") as process:
        address = f"127.0.0.1:{process.ready()['port']}"
        with (
            client(Checkpoint.open(folder), address) as experts,
            grpc.insecure_channel(address) as channel,
        ):
            incarnation = watch_once(address).incarnation
            mover = Mover(rpc.ExpertServiceStub(channel), incarnation)
            print(f"{'':22} {'calls':>7} {'p50 ms':>8} {'p99 ms':>8} {'p99.9':>8} {'max':>8} "
                  f"{'loads/s':>8}")  # fmt: skip
            for num_rows in rows:
                caller, alone, beside = Caller(experts, num_rows), Times(), Times()
                caller.run(0.5, Times())
                for _ in range(turns):
                    caller.run(seconds, alone)
                    loaded = mover.num_loaded
                    with mover.moving():
                        caller.run(seconds, beside)
                        beside.num_loaded += mover.num_loaded - loaded
                print(alone.line(f"{num_rows} rows, undisturbed"))
                print(beside.line(f"{num_rows} rows, loading"), flush=True)


def main(argv: list[str]) -> int:
    """Measures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.background_loading", description=__doc__)
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--threads", default="1", help="of the expert worker's kernels")
    parser.add_argument("--model", type=Path, help="where the model is kept")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch) / "model"
        if not folder.exists():
            save_tiny(folder, SHAPE)
        rows = [int(number) for number in options.rows.split(",")]
        measure(folder, rows, options.turns, options.seconds, ["--threads", options.threads])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
