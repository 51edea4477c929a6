"""The supervisor of `expertmesh serve`, with real processes."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from expertmesh.errors import StartupError
from expertmesh.processes import Child, spawn
from gateway.command.launcher_supervisor import MAX_BACK_OFF_S, Member, Supervisor

_PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
from expertmesh.errors import PortError
from expertmesh.processes import *
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
watch_lifeline(stopping.set)
"""
_SERVE = "announce_ready({'pid': os.getpid()}); stopping.wait(60); sys.exit(0)"
_REFUSE = "announce_failure(PortError('port 5 is in use', fix='use 6')); sys.exit(4)"


def _member(name: str, code: str = _SERVE, *, restarts: bool = True) -> Member:
    def start(on_exit: Callable[[Child], None]) -> Child:
        return spawn([sys.executable, "-c", _PRELUDE + code], name, on_exit=on_exit)

    return Member(name, start, start if restarts else None, back_off_s=0.01)


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    """Starts supervisors, and stops what is left of them at the end."""
    made: list[Supervisor] = []

    def start(*members: Member, startup_timeout_s: float = 30.0) -> Supervisor:
        made.append(Supervisor(members, startup_timeout_s=startup_timeout_s))
        made[-1].start()
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.kill()
        supervisor.stop(grace_s=0.1)


Supervise = Callable[..., Supervisor]


def _child(member: Member) -> Child:
    assert member.child is not None
    return member.child


def test_waits_for_all_and_then_for_the_condition(supervise: Supervise) -> None:
    """`wait_until` returns when every member is ready and the condition holds."""
    members = [_member("gateway", restarts=False), _member("expert worker 0")]
    supervisor = supervise(*members)
    asked: list[bool] = []

    def condition() -> bool:
        asked.append(all(member.info is not None for member in members))
        return len(asked) == 3

    supervisor.wait_until(condition, poll_s=0.01)

    assert asked == [True, True, True]
    assert [_child(member).pid for member in members] == [
        (member.info or {})["pid"] for member in members
    ]


def test_failure_at_the_start_is_told(supervise: Supervise) -> None:
    """A member that cannot start ends the waiting with its message, fix and exit code."""
    supervisor = supervise(_member("gateway", restarts=False), _member("expert worker 0", _REFUSE))

    with pytest.raises(StartupError, match="expert worker 0: port 5 is in use") as caught:
        supervisor.wait_until(lambda: True)

    assert (caught.value.fix, caught.value.exit_code) == ("use 6", 4)


def test_death_between_ready_and_condition_is_told(supervise: Supervise) -> None:
    """A member that dies while the others are still waited for is named, with how it ended."""
    members = [_member("gateway", restarts=False), _member("expert worker 0")]
    supervisor = supervise(*members)
    supervisor.wait_until(lambda: True)
    os.kill(_child(members[1]).pid, signal.SIGKILL)

    with pytest.raises(StartupError, match="expert worker 0 was killed by SIGKILL"):
        supervisor.wait_until(lambda: False, poll_s=0.01)


def test_members_that_may_restart_do(
    supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed expert worker is named in the log and started again, one that was told to end is
    not; a dead gateway ends it all."""
    caplog.set_level(logging.INFO)
    gateway, worker = _member("gateway", restarts=False), _member("expert worker 0")
    drained = _member("expert worker 1")
    supervisor = supervise(gateway, worker, drained)
    supervisor.wait_until(lambda: True)
    first, told = _child(worker), _child(drained)
    ready_again: queue.SimpleQueue[int] = queue.SimpleQueue()

    def disturb() -> None:
        told.terminate()
        told.wait(10)
        os.kill(first.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if worker.child is not first and worker.info is not None:
                break
            first.wait(0.01)
            threading.Event().wait(0.01)
        ready_again.put(_child(worker).pid)
        os.kill(_child(gateway).pid, signal.SIGKILL)

    disturber = threading.Thread(target=disturb, name="disturber")
    disturber.start()
    with pytest.raises(StartupError, match="gateway was killed by SIGKILL"):
        supervisor.watch()
    disturber.join(10)

    assert first.pid != ready_again.get(timeout=1)
    assert f"expert worker 0 (process {first.pid}) was killed by SIGKILL" in caplog.text
    assert "expert worker 0 is ready again" in caplog.text
    assert _child(drained) is told
    assert f"expert worker 1 (process {told.pid}) was told to end and stays away" in caplog.text


def test_pauses_grow(supervise: Supervise, tmp_path: Path) -> None:
    """A member that keeps failing is started after ever longer pauses, up to a limit."""
    starts = tmp_path / "starts"
    fails = f"""
if Path({str(starts)!r}).exists():
    Path({str(starts)!r}).open("a").write("x")
    sys.exit(1)
Path({str(starts)!r}).write_text("x")
announce_ready({{}})
sys.exit(1)
"""
    gateway, worker = _member("gateway", restarts=False), _member("expert worker 0", fails)
    supervisor = supervise(gateway, worker)

    def end_after_three_starts() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and worker.back_off_s < 0.08:
            threading.Event().wait(0.01)
        _child(gateway).kill()

    ender = threading.Thread(target=end_after_three_starts, name="ender")
    ender.start()
    with pytest.raises(StartupError, match="gateway was killed"):
        supervisor.watch()
    ender.join(10)

    assert 0.08 <= worker.back_off_s <= MAX_BACK_OFF_S
    assert len(starts.read_text()) >= 3


def test_stop_is_in_order_and_complete(supervise: Supervise, tmp_path: Path) -> None:
    """The gateway ends first, then the expert workers; all are reaped."""
    order = tmp_path / "order"
    serve = "announce_ready({}); stopping.wait(60); "
    note = f"Path({str(order)!r}).open('a').write"
    members = [
        _member("gateway", serve + note + "('gateway ')", restarts=False),
        _member("expert worker 0", serve + note + "('worker ')"),
        _member("expert worker 1", serve + note + "('worker ')"),
    ]
    supervisor = supervise(*members)
    supervisor.wait_until(lambda: True)
    pids = [_child(member).pid for member in members]

    supervisor.stop(grace_s=3.0)

    assert order.read_text().split() == ["gateway", "worker", "worker"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_stop_ends_what_does_not_listen(supervise: Supervise) -> None:
    """Members that ignore the request are killed, all within the promised time."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); announce_ready({}); stopping.wait(60)"
    members = [_member("gateway", deaf, restarts=False), _member("expert worker 0", deaf)]
    supervisor = supervise(*members)
    supervisor.wait_until(lambda: True)
    started = time.monotonic()

    supervisor.stop(grace_s=0.2)

    assert time.monotonic() - started < 5.0
    assert [_child(member).exit_code for member in members] == [-signal.SIGKILL] * 2


def test_late_member(supervise: Supervise) -> None:
    """A member that is not ready in time ends the start."""
    supervisor = supervise(_member("gateway", "stopping.wait(60)"), startup_timeout_s=0.3)

    with pytest.raises(StartupError, match=r"gateway was not ready after 0\.3 s"):
        supervisor.wait_until(lambda: True)
