"""`python -m expert_worker`: real processes, their memory, their end, calls across their death."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2

from attention_worker.losses import LethalRowsError
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.conftest import Models
from tests.support.expert_wire import health
from tests.support.expert_work import local, remote, to_expert, work
from tests.support.mesh import watch_once
from tests.support.processes import Managed, free_port, poll, run
from tests.support.tiny_checkpoints import MIXTRAL, TinyShape

pytestmark = pytest.mark.alone

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


def start(model_dir: Path, *flags: str, env: Mapping[str, str] | None = None) -> Managed:
    """An expert worker process on a free port."""
    argv = ["-m", "expert_worker", str(model_dir), "--port", "0", *flags]
    return Managed(argv, name="expert worker", env=env)


def entry(process: Managed) -> ExpertWorkerEntry:
    """What a gateway would put into its map, from its ready line and its Watch stream."""
    return entry_at(f"127.0.0.1:{process.ready()['port']}")


def entry_at(address: str) -> ExpertWorkerEntry:
    """What a gateway would put into its map, from a Watch stream."""
    state = watch_once(address)
    return ExpertWorkerEntry(
        worker_id=state.worker_id,
        address=address,
        incarnation=state.incarnation,
        resident={layer.layer: tuple(layer.resident) for layer in state.layers},
        row_credits=state.row_credits,
    )


@pytest.mark.parametrize(
    ("dtype", "num_workers"),
    [("float32", 3), pytest.param("bfloat16", 2, marks=pytest.mark.slow)],
)
def test_processes_equal_the_colocated_mode(
    checkpoint: Checkpoint, dtype: DtypeName, num_workers: int
) -> None:
    """Experts in other processes give the bits of experts in this one. A signal ends each of them
    with exit code 0 within its grace, with an open stream too."""
    here = local(checkpoint, dtype)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                start(
                    checkpoint.model_dir,
                    *("--dtype", dtype, "--experts", f"{index}/{num_workers}"),
                    *("--worker-id", f"w{index}"),
                )
            )
            for index in range(num_workers)
        ]
        entries = [entry(process) for process in processes]
        there = stack.enter_context(remote(checkpoint, entries, dtype))
        for seed, num_rows in enumerate((1, 3, 40)):
            for layer in checkpoint.config.moe_layers:
                todo = work(num_rows, dtype, seed=seed, layer=layer)
                assert torch.equal(todo.run(here), todo.run(there))
        for process, sign in zip(processes, (signal.SIGTERM, signal.SIGINT), strict=False):
            started = time.monotonic()
            assert process.stop(sign=sign) == 0
            assert time.monotonic() - started < 5.0
            assert "Traceback" not in process.stderr


def test_lost_copies(checkpoint: Checkpoint) -> None:
    """Stopped or killed in the middle: another copy answers with the same bits; then none is left,
    and the error says who failed.
    """
    todo = work(8)
    expected = todo.run(local(checkpoint))
    names = ("first", "second", "third")
    with ExitStack() as stack:
        copies = [
            stack.enter_context(start(checkpoint.model_dir, "--worker-id", name)) for name in names
        ]
        there = stack.enter_context(remote(checkpoint, [entry(copy) for copy in copies]))
        assert torch.equal(expected, todo.run(there))
        for copy, sign in zip(copies, (signal.SIGSTOP, signal.SIGKILL), strict=False):
            copy.process.send_signal(sign)
            for _ in range(5):
                assert torch.equal(expected, todo.run(there, timeout_s=3.0))
        for copy in copies:
            copy.process.kill()
        # Whose end is seen only when it has these rows may be one of two that are blamed on them.
        lost = (ExpertUnavailableError, LethalRowsError)
        with pytest.raises(lost, match=r"expert worker (first|second|third) at"):
            todo.run(there, timeout_s=3.0)


@pytest.mark.parametrize("told_by", ["a signal", "an order"])
def test_a_drain_hands_over(checkpoint: Checkpoint, told_by: str) -> None:
    """Told to stop it says so, and answers until its experts were moved; then it exits with 0. The
    time that it may take is not used up."""
    flags = "--experts", "1-2", "--worker-id", "leaves", "--drain-grace-s", "600"
    todo = to_expert(1, num_rows=8)
    expected = todo.run(local(checkpoint))
    with start(checkpoint.model_dir, *flags) as process, ExitStack() as stack:
        address = f"127.0.0.1:{process.ready()['port']}"
        there = stack.enter_context(remote(checkpoint, [entry_at(address)], direct=True))
        stub = rpc.ExpertServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        watch = stub.Watch(pb.WatchRequest(hands_over=True))
        incarnation = next(watch).incarnation
        order = None
        if told_by == "an order":
            order = stub.Drain(pb.DrainRequest(incarnation=incarnation))
        else:
            process.process.send_signal(signal.SIGTERM)
        assert any(snapshot.draining for snapshot in watch)
        assert torch.equal(expected, todo.run(there))
        held = [(layer, expert) for layer in (0, 1, 2) for expert in (1, 2)]
        unload = pb.UnloadExpertsRequest(
            incarnation=incarnation,
            experts=[pb.ExpertId(layer=layer, expert=expert) for layer, expert in held],
        )
        list(stub.UnloadExperts(unload, timeout=TIMEOUT_S))
        if order is not None:
            assert list(order)[-1].drained
        assert process.wait(TIMEOUT_S) == 0
        assert "Traceback" not in process.stderr


def test_an_empty_start(checkpoint: Checkpoint) -> None:
    """It holds nothing, has room for what it was told, is healthy for an orchestrator, and its
    kernels are warm: neither loading nor the first calls look for one.
    """
    health_port = free_port()
    flags = (
        *("--experts", "none", "--expert-slots", "6", "--worker-id", "empty"),
        *("--health-port", str(health_port)),
    )
    with start(checkpoint.model_dir, *flags, env={"NUMBA_DEBUG_CACHE": "1"}) as process:
        address = f"127.0.0.1:{process.ready()['port']}"
        empty = watch_once(address)
        assert (empty.capacity.expert_slots, empty.capacity.used_expert_slots) == (6, 0)
        assert not empty.layers
        with grpc.insecure_channel(f"127.0.0.1:{health_port}") as opened:
            for service in ("startup", "readiness", "liveness"):
                assert health(opened, service) == health_pb2.HealthCheckResponse.SERVING
        at_start = process.stdout
        assert "[cache]" in at_start, "the test shows nothing"
        wanted = [(layer, expert) for layer in (0, 1, 2) for expert in (1, 2)]
        load(address, empty.incarnation, wanted)
        full = load_events(address, empty.incarnation, [(0, 0)])[-1]
        assert full.message == "no free slot for layer 0 expert 0: all 6 are in use"
        todo = to_expert(1, num_rows=8)
        with remote(checkpoint, [entry_at(address)], direct=True) as there:
            assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert "[cache]" not in process.stdout[len(at_start) :]


BIG = TinyShape(num_layers=2, hidden_size=256, intermediate_size=1024, num_heads=4, seed=6)


def test_memory_is_that_of_own_experts(models: Models) -> None:
    """A process grows by the experts that it loads, and not by those of others."""
    model = Checkpoint.open(models.tiny(BIG))
    with start(model.model_dir, "--experts", "none", "--worker-id", "grows") as process:
        address = f"127.0.0.1:{process.ready()['port']}"
        before = watch_once(address)
        load(address, before.incarnation, [(0, 0)])  # what the first load costs once
        rss_before = psutil.Process(process.process.pid).memory_info().rss
        load(
            address, before.incarnation, [(layer, expert) for layer in (0, 1) for expert in (2, 3)]
        )
        after = watch_once(address)
        own_bytes = 4 * after.capacity.bytes_per_expert

        def has_grown() -> bool:  # by its experts; all others would be twice as much
            growth = psutil.Process(process.process.pid).memory_info().rss - rss_before
            return 0.8 * own_bytes < growth < 1.5 * own_bytes

        poll(has_grown, timeout_s=TIMEOUT_S, what="it holds its own experts and no more")
    assert before.capacity.resident_bytes == 0
    assert own_bytes == 4 * 3 * 256 * 1024 * 4
    assert after.capacity.resident_bytes == 5 * after.capacity.bytes_per_expert


def load(address: str, incarnation: int, experts: list[tuple[int, int]]) -> None:
    """Loads experts and waits until they are resident."""
    events = load_events(address, incarnation, experts)
    assert [event.state for event in events][1::2] == [pb.EXPERT_STATE_RESIDENT] * len(experts)


def load_events(
    address: str, incarnation: int, experts: list[tuple[int, int]]
) -> list[pb.LoadExpertsResponse]:
    """What an expert worker says while it loads."""
    message = pb.LoadExpertsRequest(
        incarnation=incarnation,
        experts=[pb.ExpertId(layer=layer, expert=expert) for layer, expert in experts],
    )
    with grpc.insecure_channel(address) as channel:
        return list(rpc.ExpertServiceStub(channel).LoadExperts(message, timeout=TIMEOUT_S))


def test_start_up_errors_are_short(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A port in use, a bad selection and a missing folder: what, fix, and an exit code."""
    model = str(checkpoint.model_dir)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (
                [model, "--port", str(port)],
                4,
                f"cannot listen on 127.0.0.1:{port}: Address",
            ),
            ([model, "--port", "0", "--experts", "8"], 2, "experts has '8', but the model has 8"),
            ([str(tmp_path / "no"), "--port", "0"], 3, "not a folder"),
        ]
        for argv, exit_code, text in cases:
            ended = run(["-m", "expert_worker", *argv], timeout_s=TIMEOUT_S)
            assert ended.returncode == exit_code
            error, *fix = ended.stderr.splitlines()
            assert error.startswith("error: ")
            assert text in error
            assert all(line.startswith("fix: ") for line in fix)
