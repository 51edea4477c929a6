"""Child processes, with real ones: readiness, early death, stopping, and a parent that dies."""

from __future__ import annotations

import os
import queue
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from expertmesh.errors import StartupError
from expertmesh.processes import (
    LIFELINE_FD,
    READY_FD,
    Child,
    child_environment,
    spawn,
    write_error,
)

_PRELUDE = """
import os, signal, sys, threading
from expertmesh.errors import CheckpointError
from expertmesh.processes import *
"""
_SERVE = """
stopping = threading.Event()
watch_lifeline(stopping.set)
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
announce_ready({"port": 7, "pid": os.getpid()})
stopping.wait(60)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)]


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children that are killed at the end, whatever happened."""
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()
        assert child.wait(5)
        child.stop(0)


def _start(children: list[Child], code: str, env: Mapping[str, str] | None = None) -> Child:
    child = spawn(_python(code), "helper", environment=env)
    children.append(child)
    return child


def _gone(pid: int, timeout_s: float) -> bool:
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_ready_line_and_graceful_stop(children: list[Child]) -> None:
    """A child announces itself, and ends with its own exit code when asked to."""
    child = _start(children, _SERVE)

    assert {"port": 7, "pid": child.pid} == child.wait_ready(20)
    assert child.alive
    child.stop(10)

    assert child.exit_code == 0
    assert child.describe_exit() == "ended with exit code 0"
    assert not psutil.pid_exists(child.pid)  # reaped: not even a zombie is left


def test_child_that_names_its_error(children: list[Child]) -> None:
    """The child's message, fix and exit code reach whoever waits for it."""
    child = _start(
        children,
        'error = CheckpointError("no such model", fix="build it")\n'
        "announce_failure(error); sys.exit(error.exit_code)",
    )

    with pytest.raises(StartupError) as caught:
        child.wait_ready(20)

    assert caught.value.message == "helper: no such model"
    assert caught.value.fix == "build it"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(5)", "helper ended with exit code 5 before it was ready"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "helper was killed by SIGKILL before it was"),
    ],
)
def test_child_that_dies_early(children: list[Child], code: str, message: str) -> None:
    """An end without a word is noticed at once and described."""
    started = time.monotonic()

    with pytest.raises(StartupError, match=message):
        _start(children, code).wait_ready(30)

    assert time.monotonic() - started < 15


def test_child_that_is_never_ready(children: list[Child]) -> None:
    """Waiting ends at the deadline, and the child can still be stopped."""
    child = _start(children, "threading.Event().wait(60)")

    with pytest.raises(StartupError, match=r"helper was not ready after 0\.2 s"):
        child.wait_ready(0.2)


def test_child_that_ignores_the_request_to_stop(children: list[Child]) -> None:
    """After the grace it is killed."""
    child = _start(
        children,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        announce_ready({})
        threading.Event().wait(60)
        """,
    )
    child.wait_ready(20)

    child.stop(0.2)

    assert child.exit_code == -signal.SIGKILL
    assert child.describe_exit() == "was killed by SIGKILL"


def test_program_that_does_not_exist() -> None:
    """A program that cannot be started is a StartupError and leaves no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(StartupError, match="cannot start ghost"):
        spawn(["/no/such/program"], "ghost")

    assert before == len(os.listdir("/proc/self/fd"))


def test_descriptors_are_returned(children: list[Child]) -> None:
    """A child's pipes are closed once it has ended and was stopped."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child = spawn(_python("announce_ready({})"), "helper")
        child.wait_ready(20)
        assert child.wait(10)
        child.stop(0)

    assert before == len(os.listdir("/proc/self/fd"))


def test_on_exit_is_called_once() -> None:
    """The owner of a child learns of its end from the waiter thread."""
    ended: queue.SimpleQueue[tuple[Child, int | None, str]] = queue.SimpleQueue()

    def note(child: Child) -> None:
        ended.put((child, child.exit_code, threading.current_thread().name))

    child = spawn(_python("sys.exit(4)"), "helper", on_exit=note)

    assert (child, 4, "helper-waiter") == ended.get(timeout=20)
    assert ended.empty()
    child.stop(0)


def test_children_do_not_outlive_a_killed_parent(children: list[Child]) -> None:
    """SIGKILL of a parent ends its child and grandchild, though nobody told them."""
    nested = f"""
    import subprocess
    inner = spawn([sys.executable, "-c", {_PRELUDE + _SERVE!r}], "inner")
    announce_ready({{"inner": inner.wait_ready(20)["pid"]}})
    threading.Event().wait(60)
    """
    parent = _start(children, nested)
    inner = parent.wait_ready(30)["inner"]
    assert isinstance(inner, int)
    assert psutil.pid_exists(inner)

    os.kill(parent.pid, signal.SIGKILL)

    assert parent.wait(5)
    assert _gone(inner, 5)


def test_orphan_that_cannot_stop_is_ended(children: list[Child]) -> None:
    """If the graceful stop of an orphan hangs, the process ends without it."""
    hanging = """
    watch_lifeline(lambda: None, hard_exit_s=0.2)
    announce_ready({"pid": os.getpid()})
    threading.Event().wait(60)
    """
    parent = _start(
        children,
        f"""
        inner = spawn([sys.executable, "-c", {_PRELUDE + textwrap.dedent(hanging)!r}], "inner")
        announce_ready(inner.wait_ready(20))
        threading.Event().wait(60)
        """,
    )
    inner = parent.wait_ready(30)["pid"]
    assert isinstance(inner, int)

    parent.kill()

    assert _gone(inner, 5)


def test_interrupt_of_the_terminal_spares_children(children: list[Child]) -> None:
    """A child is in a process group of its own, which Ctrl-C of the terminal does not reach, and in
    our session: some kernels share out the cores by session first, and by priority within one."""
    child = _start(children, _SERVE)
    child.wait_ready(20)

    assert os.getpgid(0) != os.getpgid(child.pid)
    assert os.getsid(0) == os.getsid(child.pid)


def test_output_of_children_goes_to_standard_error(
    children: list[Child], capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard output stays the parent's own."""
    child = _start(children, "sys.stdout.write('hello'); announce_ready({})")
    child.wait_ready(20)
    assert child.wait(10)

    assert capfd.readouterr() == ("", "hello")


def test_environment_of_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread a process, our kernel cache, and no descriptors of another child."""
    monkeypatch.setenv("EXPERTMESH_HOME", str(tmp_path))
    for name in ("NUMBA", "TRITON"):
        monkeypatch.delenv(f"{name}_CACHE_DIR", raising=False)
    monkeypatch.setenv(LIFELINE_FD, "99")
    monkeypatch.setenv(READY_FD, "98")

    environment = child_environment({"EXTRA": "1"})

    threads = {environment[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    assert {"1"} == threads
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert str(tmp_path / "numba") == environment["NUMBA_CACHE_DIR"]
    assert str(tmp_path / "triton") == environment["TRITON_CACHE_DIR"]
    assert "glibc.malloc.hugetlb=1" in environment["GLIBC_TUNABLES"]
    assert environment["EXTRA"] == "1"
    assert not {LIFELINE_FD, READY_FD} & environment.keys()


def test_folder_of_the_caller_is_not_imported(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named like one of our packages, where we are started, is not mistaken for it."""
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('wrong package')")
    monkeypatch.chdir(tmp_path)
    child = _start(children, "import gateway; announce_ready({'file': gateway.__file__})")

    found = child.wait_ready(20)["file"]

    assert str(tmp_path) not in str(found)


def test_started_by_hand_errors_go_to_the_terminal(children: list[Child]) -> None:
    """Without a parent, `announce_failure` writes the line that a parent would show."""
    import subprocess

    code = 'announce_ready({}); watch_lifeline(None); announce_failure(CheckpointError("x\\ny"))'
    done = subprocess.run(
        _python(code), env=child_environment(), capture_output=True, text=True, timeout=20
    )

    assert done.stderr == "error: x y\n"
    assert done.returncode == 0


def test_errors_are_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What, why and fix; a traceback only where it is asked for."""
    monkeypatch.delenv("EXPERTMESH_DEBUG", raising=False)
    error = StartupError("port 1 is in use", fix="choose another")
    write_error(error)
    assert capsys.readouterr().err == "error: port 1 is in use\nfix: choose another\n"

    monkeypatch.setenv("EXPERTMESH_DEBUG", "1")
    write_error(error)
    assert "StartupError" in capsys.readouterr().err
