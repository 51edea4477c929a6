"""One leader among real processes, and tokens that only grow."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expertmesh.errors import StartupError
from gateway.placement.election import FileElection, NoElection

_CANDIDATE = """
import sys, threading
from pathlib import Path
from gateway.placement.election import FileElection
election = FileElection(Path(sys.argv[1]), poll_s=0.02)
election.start(lambda token: print(token, flush=True))
sys.stdin.read()
election.stop()
"""


class Candidate:
    """A process that takes part until it is killed or told to stop."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", _CANDIDATE, str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def heard(self) -> str:
        """What it was told next; waits."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        """Lets it end in order."""
        self.process.communicate()


def test_a_killed_leader_is_followed_at_once_and_tokens_grow(tmp_path: Path) -> None:
    """kill -9 frees the lock; each leader has a higher token; a stopped one says so."""
    path = tmp_path / "folder" / "leader"
    first = Candidate(path)
    assert first.heard() == "1"
    second = Candidate(path)
    first.process.send_signal(signal.SIGKILL)
    assert second.heard() == "2"
    first.stop()
    third = Candidate(path)
    second.stop()
    assert third.heard() == "3"
    third.stop()
    assert path.read_text() == f"{3:020d}\n"


def test_one_leads_and_the_other_waits(tmp_path: Path) -> None:
    """Two in one process exclude each other too, as each opens the file itself."""
    heard: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
    first = FileElection(tmp_path / "leader", poll_s=0.01)
    second = FileElection(tmp_path / "leader", poll_s=0.01)
    first.start(lambda token: heard.put(("first", token)))
    assert heard.get(timeout=10) == ("first", 1)
    second.start(lambda token: heard.put(("second", token)))
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.1)
    first.stop()
    assert heard.get(timeout=10) == ("first", None)
    assert heard.get(timeout=10) == ("second", 2)
    second.stop()
    assert heard.get(timeout=10) == ("second", None)
    assert heard.empty()


def test_who_never_led_is_told_nothing(tmp_path: Path) -> None:
    """Stopping while waiting for the lock is no change."""
    heard: list[int | None] = []
    first, second = (FileElection(tmp_path / "leader", poll_s=0.01) for _ in range(2))
    led: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    first.start(led.put)
    assert led.get(timeout=10) == 1
    second.start(heard.append)
    second.stop()
    first.stop()
    assert heard == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """Its text is named; so is a path that cannot be a file."""
    path = tmp_path / "leader"
    path.write_text("hello")
    with pytest.raises(StartupError, match=r"leader is not a file of fencing tokens.*hello"):
        FileElection(path).start(lambda token: None)
    with pytest.raises(StartupError, match="below: "):
        FileElection(path / "below" / "below").start(lambda token: None)


def test_no_election_never_leads() -> None:
    """Nothing is called, nothing is left."""
    election = NoElection()
    election.start(lambda token: pytest.fail("leads"))
    election.stop()
