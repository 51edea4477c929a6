"""The cores of real processes, as the system sees them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from expertmesh.cores import parse_cores, share_cores, usable_cores
from tests.support.mesh import Server
from tests.support.processes import run


def _allowed(pid: int) -> tuple[int, ...]:
    """Cores that the main thread of a process may run on."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (text,) = (line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))
    return parse_cores(text)


def _processes(server: Server, module: str) -> list[psutil.Process]:
    found = [each for each in server.process.descendants() if module in each.cmdline()]
    return sorted(found, key=lambda process: process.cmdline())


def test_expert_workers_stay_on_their_cores(text_server: Server) -> None:
    """Two share the cores; gateway and attention worker may run anywhere."""
    usable = usable_cores()
    workers = _processes(text_server, "expert_worker")
    shares = share_cores(usable, len(workers))
    expected = [parse_cores(share.cores) or usable.ids for share in shares]
    assert len(workers) == 2
    assert sorted(_allowed(process.pid) for process in workers) == sorted(expected)
    for module in ("gateway", "attention_worker"):
        (process,) = _processes(text_server, module)
        assert _allowed(process.pid) == usable.ids


@pytest.mark.parametrize(
    ("flags", "threads", "message"),
    [
        (("--cores", "90000"), "1", "cores has 90000, but this process may run on"),
        ((), "none", "EXPERTMESH_THREADS is 'none', expected a whole number"),
        (("--threads", str(1 + (os.cpu_count() or 1))), "1", "but this process may use"),
    ],
    ids=["cores", "environment", "threads"],
)
def test_what_cannot_be_is_refused(
    text_model: Path, flags: tuple[str, ...], threads: str, message: str
) -> None:
    """One line says what, before anything slow is done."""
    argv = ["-m", "expert_worker", str(text_model), "--port", "0", *flags]
    ended = run(argv, env={"EXPERTMESH_THREADS": threads})
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert message in errors[0]
