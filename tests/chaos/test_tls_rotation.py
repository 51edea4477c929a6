"""The authority of a mesh is replaced under load, in the order in which an operator does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest

from expertmesh.transport import MutualTls, Transport
from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.pool import PoolWorker, running
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.certificates import Authority, mesh_flags, trust
from tests.support.mesh import gateway, watch_once
from tests.support.processes import poll

pytestmark = [pytest.mark.alone, pytest.mark.chaos]

TIMEOUT_S = 60.0
FOLDERS = ("gateway", "worker-0", "worker-1")


def test_rotation(tiny_mixtral: Path, traffic: Traffic, table: list[Row], tmp_path: Path) -> None:
    """Both authorities are trusted, then certificates are the new one's, then it alone is trusted;
    expert workers restart in turn after each step, so that connections are made by what is there.
    """
    row = Row("rotation of certificates", note="3 steps, 2 restarts each")
    table.append(row)
    old, new = Authority.new("old authority"), Authority.new("new authority")
    folders = [tmp_path / name for name in FOLDERS]
    files = [old.issue(folder) for folder in folders]
    own, *flags = map(mesh_flags, files)
    members = [PoolWorker(tiny_mixtral, "all", ("--dtype", "float32", *each)) for each in flags]
    with (
        running(members) as workers,
        gateway(tiny_mixtral, [each.address for each in workers], "--threads", "1", *own) as server,
    ):
        mesh, transport = Mesh(workers, server), MutualTls(files[0])
        mesh.wait_all_ready()
        with Load([mesh.api.port], traffic.workload, NUM_STREAMS) as load:
            load.wait_tokens(RUNNING_TOKENS)
            for step in _steps(old, new):
                for folder in folders:
                    step(folder)
                for worker in workers:
                    row.times += 1
                    row.recoveries_s.append(_restart(worker, transport))
                    load.wait_tokens(RUNNING_TOKENS)
            streams = load.finish()
        wait_idle(mesh.api)
        row.note += f", longest gap {longest_gap_s(streams):.1f} s"
        judge(streams, traffic.expected, row)
        stranger = MutualTls(old.issue(tmp_path / "stranger", trusted=(new,)))
        for worker in workers:
            with pytest.raises(grpc.RpcError) as caught:
                watch_once(worker.address, transport=stranger, wait=False)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def _steps(old: Authority, new: Authority) -> Sequence[Callable[[Path], object]]:
    return (
        lambda folder: trust(folder, (old, new)),
        lambda folder: new.issue(folder, trusted=(old, new)),
        lambda folder: trust(folder, (new,)),
    )


def _restart(worker: PoolWorker, transport: Transport) -> float:
    """Stops one and starts it again; the seconds until the gateway asks its new life."""
    began_s = time.monotonic()
    worker.stop()
    worker.start()
    worker.wait_ready()
    poll(
        lambda: watch_once(worker.address, transport=transport).load.calls > 0,
        timeout_s=TIMEOUT_S,
        what="the new life is asked",
    )
    return time.monotonic() - began_s
