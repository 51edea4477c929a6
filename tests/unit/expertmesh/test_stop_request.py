"""Being told to end: at any moment, more than once, and for good."""

from __future__ import annotations

import signal
import subprocess
import sys
from select import select

import pytest

from expertmesh.processes import child_environment

WAIT_S = 20.0
NUM_SIGNALS = 1000


def run(code: str, *, orderly: bool = True) -> subprocess.Popen[str]:
    """A Python process that has a listening StopRequest named `stopping`."""
    head = (
        "from expertmesh.stop_request import StopRequest, end_within\n"
        "stopping = StopRequest()\n"
        "stopping.listen()\n" + "stopping.orderly()\n" * orderly + "print('up', flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    """The waiting process goes on to its orderly end."""
    with run("stopping.wait()\nraise SystemExit(7)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(WAIT_S) == 7


def test_a_process_that_starts_ends_at_once() -> None:
    """Before there is anything to end in order, nobody waits for imports and loading."""
    with run("import time\ntime.sleep(60)", orderly=False) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(2.0) == 0


def test_an_end_that_gets_stuck_is_cut() -> None:
    """A thread that never ends cannot keep the process."""
    code = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "stopping.wait()\n"
        "end_within(0.2)\n"
    )
    with run(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(WAIT_S) == 71


def test_a_second_interrupt_ends_at_once() -> None:
    """An orderly end that takes long is cut short at a terminal, and by SIGTERM it is not."""
    code = (
        "stopping.wait()\n"
        "print('ending', flush=True)\n"
        "stopping.wait()\n"
        "print('told again', flush=True)\n"
        "stopping.wait()\n"
    )
    with run(code) as process:
        assert process.stdout is not None
        for line in ("up\n", "ending\n"):
            assert process.stdout.readline() == line
            process.terminate()
        assert process.stdout.readline() == "told again\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


def test_a_wish_may_interrupt_another_one() -> None:
    """Many signals while wishes are made: nothing blocks, as a lock would."""
    code = (
        "import os, signal\n"
        "for _ in range(2000):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    stopping.make()\n"
        "stopping.wait()\n"
        "raise SystemExit(7 if stopping.made else 1)"
    )
    with run(code) as process:
        assert process.wait(WAIT_S) == 7


def test_a_signal_waits_until_another_program_listens() -> None:
    """A process that becomes another one is told to stop in between, and stops in order."""
    code = (
        "import os, sys\n"
        "from expertmesh.stop_request import StopRequest, keep_for_later\n"
        "keep_for_later()\n"
        "print('changing', flush=True)\n"
        "sys.stdin.readline()\n"
        "os.execve(sys.executable, [sys.executable, '-c', sys.argv[1]], os.environ)\n"
    )
    later = (
        "from expertmesh.stop_request import StopRequest\n"
        "stopping = StopRequest()\n"
        "stopping.orderly()\n"
        "stopping.listen()\n"
        "stopping.wait()\n"
        "raise SystemExit(7)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, later],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "changing\n"
        process.terminate()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(WAIT_S) == 7


def test_no_signal_is_missed_while_others_compute() -> None:
    """The system may interrupt any thread: the one that waits is woken nevertheless."""
    code = (
        "import threading, zlib\n"
        "def compute(data=bytes(1 << 16)):\n"
        "    while True:\n"
        "        zlib.crc32(data)\n"  # without Python's lock
        "for _ in range(4):\n"
        "    threading.Thread(target=compute, daemon=True).start()\n"
        "while True:\n"
        "    stopping.wait()\n"
        "    print('told', flush=True)\n"
    )
    with run(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for number in range(NUM_SIGNALS):
            process.terminate()
            assert select([process.stdout], [], [], WAIT_S)[0], f"missed signal {number}"
            assert process.stdout.readline() == "told\n"
        process.kill()


def test_nothing_is_wished_at_first() -> None:
    """A new request is not made."""
    with run("raise SystemExit(stopping.made)") as process:
        assert process.wait(WAIT_S) == 0
