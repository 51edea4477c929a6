"""A start without compiled kernels: they are compiled by processes that end."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.mesh import serve
from tests.support.processes import Managed, poll

HAS_BEGUN = "compiling kernels in a process of its own"
IS_DONE = re.compile(r"kernels: (\d+) from disk, (\d+) compiled here")


def _nothing_compiled(tmp_path: Path) -> Mapping[str, str]:
    return {"NUMBA_CACHE_DIR": str(tmp_path / "numba")}


def _compiler_of(worker: Managed) -> psutil.Process:
    """Of an expert worker that has just been started."""
    poll(lambda: HAS_BEGUN in worker.stderr, timeout_s=60.0, what="a line in the log")
    process = psutil.Process(worker.process.pid)
    poll(lambda: bool(process.children()), timeout_s=10.0, what="a child")
    (compiler,) = process.children()
    return compiler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_ends_leaves_no_compiler(
    tmp_path: Path, text_model: Path, number: signal.Signals
) -> None:
    """However it ends while its kernels are compiled."""
    argv = ["-m", "expert_worker", str(text_model), "--port", "0"]
    with Managed(argv, name="expert worker", env=_nothing_compiled(tmp_path)) as worker:
        compiler = _compiler_of(worker)
        worker.process.send_signal(number)
        worker.process.wait(5.0)
        compiler.wait(5.0)
        assert not compiler.is_running()


@pytest.mark.slow
def test_a_killed_compiler(tmp_path: Path, text_model: Path) -> None:
    """The worker says so in one line, and compiles itself."""
    argv = ["-m", "expert_worker", str(text_model), "--port", "0"]
    with Managed(argv, name="expert worker", env=_nothing_compiled(tmp_path)) as worker:
        _compiler_of(worker).kill()
        worker.ready()
        (line,) = [line for line in worker.stderr.splitlines() if "warning" in line]
        assert "was killed by SIGKILL before it was ready; kernels are compiled here" in line


@pytest.mark.slow
def test_no_worker_compiles(tmp_path: Path, text_model: Path) -> None:
    """A first start leaves the same kernels in each worker as any other."""
    env = _nothing_compiled(tmp_path)
    seen = []
    for _ in range(2):
        with serve(text_model, "--log-level", "debug", dtype="bfloat16", env=env) as server:
            found = IS_DONE.findall(server.process.stderr)
            seen.append(sorted((int(loaded), int(compiled)) for loaded, compiled in found))
            assert (HAS_BEGUN in server.process.stderr) == (len(seen) == 1)
    first, second = seen
    assert len(first) == 3
    assert all(compiled == 0 for _, compiled in first)
    assert first == second
