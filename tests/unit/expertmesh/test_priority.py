"""Work that stays behind for the cores, in real threads."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from expertmesh.priority import run_behind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_stays_behind_and_the_caller_does_not() -> None:
    """The work has so much more niceness; the caller keeps its own, and gives it to its threads."""
    before = _niceness()
    seen: list[int] = []

    assert run_behind(7, _niceness) == min(before + 7, 19)

    later = threading.Thread(target=lambda: seen.append(_niceness()), name="later")
    later.start()
    later.join(5.0)
    assert [_niceness(), *seen] == [before, before]


def test_errors_of_the_work_are_raised() -> None:
    """As if the caller had done it."""
    with pytest.raises(ZeroDivisionError):
        run_behind(0, lambda: 1 // 0)
