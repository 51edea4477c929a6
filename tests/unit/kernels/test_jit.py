"""Compiled functions and the folder that keeps them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertmesh.file_lock import exclusive
from expertmesh_kernels.cpu import kept
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.kept import KEPT


def double(number: int) -> int:
    return 2 * number


def test_a_full_disk_does_not_keep_a_kernel_from_running(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be saved is compiled and runs all the same, with a warning."""
    compiled = njit(double)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = compiled._cache  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "_load_overload", lambda *_: None)
    monkeypatch.setattr(cache, "_save_overload", full)
    with caplog.at_level(logging.WARNING):
        assert compiled(21) == 42
    assert "No space left on device" in caplog.text


def test_two_processes_do_not_save_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves asks for the folder's lock, and has it meanwhile; else both would choose the same
    file."""
    compiled = njit(double)
    cache = compiled._cache  # type: ignore[attr-defined]
    lock = Path(cache.cache_path) / "saving.lock"
    arrived = threading.Event()
    events: list[str] = []

    @contextmanager
    def recorded(path: Path, timeout_s: float) -> Iterator[None]:
        assert path == lock
        arrived.set()
        with exclusive(path, timeout_s):
            events.append("locked")
            yield
            events.append("done")

    monkeypatch.setattr(kept, "exclusive", recorded)
    monkeypatch.setattr(cache, "_load_overload", lambda *_: None)
    monkeypatch.setattr(cache, "_save_overload", lambda *_: events.append("saved"))
    caller = threading.Thread(target=compiled, args=(21,), name="compiles")
    with exclusive(lock):
        caller.start()
        assert arrived.wait(120.0)
        assert events == []
    caller.join(120.0)
    assert events == ["locked", "saved", "done"]


DOUBLE_ALL = """
import sys
import numpy as np
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.kept import KEPT
from tests.unit.kernels.test_jit import double

compiled = njit(double)
print("ready", flush=True)
sys.stdin.readline()
for dtype in sys.argv[1:]:
    number = np.dtype(dtype).type(2.5)
    assert compiled(number) == 2 * number, dtype
print(KEPT.num_compiled)
"""


def test_types_that_two_processes_compile_at_once_are_told_apart(tmp_path: Path) -> None:
    """Each finds its own kernel afterwards, however their saving met."""

    def start(*dtypes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DOUBLE_ALL, *dtypes]
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def compile_at_once(*processes: subprocess.Popen[bytes]) -> list[bytes]:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes)
        return printed

    compile_at_once(start("float32", "int64"), start("float64", "uint64"))
    again = start("float32", "int64", "float64", "uint64")
    assert compile_at_once(again) == [b"0\n"]


def test_a_missing_kernel_is_asked_for_until_there_is_no_more_hope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each fetch that may have brought it the disk is asked again; then it is compiled."""
    compiled = njit(double)
    asked: list[str] = []
    answers = iter([True, True, False])

    def load(*_: object) -> None:
        asked.append("disk")

    def fetch() -> bool:
        asked.append("others")
        return next(answers)

    cache = compiled._cache  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "_load_overload", load)
    monkeypatch.setattr(KEPT, "fetch", fetch)
    before = KEPT.num_compiled
    assert compiled(21) == 42
    assert asked == ["disk", "others", "disk", "others", "disk", "others"]
    assert KEPT.num_compiled == before + 1
