"""A process that compiles for others: it is one, it ends in time, and nothing depends on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from expertmesh.compile_process import CompileProcess
from tests.support.processes import poll

MODULE = "tests.support.compiler"


class Compiling:
    """A cache's folder, and who compiled into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cache"
        self.folder.mkdir()
        self._file = folder / "pids"

    def process(
        self,
        how: str,
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        deadline_s: float = 60.0,
    ) -> CompileProcess:
        """As a worker has it; the child behaves as told."""
        arguments = how, str(self._file)
        return CompileProcess(MODULE, arguments, self.folder, is_stopping, deadline_s=deadline_s)

    @property
    def pids(self) -> list[int]:
        """Children that were started, in order."""
        return [int(line) for line in self._file.read_text().split()] if self.has_begun() else []

    def has_begun(self) -> bool:
        """Whether there was any child."""
        return self._file.exists() and self._file.read_text().endswith("\n")


@pytest.fixture
def compiling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Compiling:
    """An empty cache."""
    caplog.set_level(logging.INFO)
    return Compiling(tmp_path)


def test_a_child_compiles_once(compiling: Compiling) -> None:
    """After it kernels are looked for again; what is still missing is compiled by the worker."""
    process = compiling.process("compile")
    assert [process.fetch() for _ in range(3)] == [True, False, False]
    assert len(compiling.pids) == 1


def test_two_workers_that_start_together_compile_once(
    compiling: Compiling, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one waits for the first one's child, says so, and looks again."""
    is_told = threading.Event()
    first = compiling.process("hang", is_stopping=is_told.is_set)
    second = compiling.process("compile")
    with ThreadPoolExecutor(2) as pool:
        of_first = pool.submit(first.fetch)
        poll(compiling.has_begun, timeout_s=30.0, what="a child")
        of_second = pool.submit(second.fetch)
        waits = "another process compiles kernels, 0 so far"
        poll(lambda: waits in caplog.text, timeout_s=30.0, what="a line in the log")
        assert len(compiling.pids) == 1
        is_told.set()
        assert not of_first.result(30.0)
        assert of_second.result(30.0)
    assert len(compiling.pids) == 1
    assert second.fetch(), "the first one failed, so the second compiles"
    assert len(compiling.pids) == 2


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("die", "the process that compiles kernels was killed by SIGKILL before it was ready"),
        ("refuse", "the process that compiles kernels: no such model"),
    ],
)
def test_a_failed_child(
    compiling: Compiling, caplog: pytest.LogCaptureFixture, how: str, expected: str
) -> None:
    """One line says why; the worker compiles itself."""
    process = compiling.process(how)
    assert [process.fetch() for _ in range(2)] == [False, False]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = [record.getMessage() for record in warnings]
    assert line == f"{expected}; kernels are compiled here, which takes more memory"


def test_a_child_that_takes_too_long(
    compiling: Compiling, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ended at the deadline, and the log says so."""
    assert not compiling.process("hang", deadline_s=3.0).fetch()
    assert not any(psutil.pid_exists(pid) for pid in compiling.pids)
    assert "compiling: not done within 3 s; kernels are compiled here" in caplog.text


def test_a_worker_that_is_told_to_stop_ends_its_child(
    compiling: Compiling, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left of it, and nothing is said about memory."""
    process = compiling.process("hang", is_stopping=compiling.has_begun)
    assert not process.fetch()
    (pid,) = compiling.pids
    assert not psutil.pid_exists(pid)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_folder_that_is_not_there(compiling: Compiling, caplog: pytest.LogCaptureFixture) -> None:
    """Without a place for a lock nothing is started."""
    compiling.folder.rmdir()
    assert not compiling.process("compile").fetch()
    assert compiling.pids == []
    assert "No such file or directory" in caplog.text
