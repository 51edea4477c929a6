"""Garbage is collected when nothing is done, and what was loaded is not looked at again."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from expertmesh.quiet_gc import YOUNG_OBJECTS, QuietGc, pause_while_starting

WAIT_S = 10.0


class Knot:
    """An object that only the search for cycles can free."""

    def __init__(self) -> None:
        self.own = self


def knot() -> weakref.ref[Knot]:
    """One that nobody holds."""
    return weakref.ref(Knot())


def until(condition: Callable[[], bool]) -> None:
    """Waits until it holds."""
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


@pytest.fixture
def counting() -> Iterator[list[int]]:
    """Generations that were collected, in order."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


def test_collects_when_nothing_is_done(counting: list[int]) -> None:
    """Never while something is done; once afterwards; again after more was done."""
    work = [0]

    def busy() -> int:
        work[0] += 1
        return work[0]

    done: list[Callable[[], object]] = [busy]
    with QuietGc(lambda: done[0](), look_every_s=0.005):
        lost, seen = knot(), work[0]
        until(lambda: work[0] > seen + 20)
        assert lost() is not None
        done[0] = lambda: -1
        until(lambda: lost() is None)
        counting.clear()
        again = knot()
        threading.Event().wait(0.1)
        assert (again() is not None, counting) == (True, [])
        done[0] = lambda: -2
        until(lambda: again() is None)


def test_settings_are_owned_and_given_back(counting: list[int]) -> None:
    """Inside: what is there is frozen, and young objects are looked through rarely."""
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    with QuietGc(lambda: 0, look_every_s=WAIT_S):
        assert gc.get_freeze_count() > before
        counting.clear()
        kept = [[] for _ in range(YOUNG_OBJECTS // 2)]
        assert counting == []
        kept += [[] for _ in range(YOUNG_OBJECTS)]
        assert counting
    assert gc.get_threshold() == thresholds
    assert "quiet-gc" not in {thread.name for thread in threading.enumerate()}


def test_a_start_looks_for_nothing(counting: list[int]) -> None:
    """Between the beginning of a start and its end nothing is looked through; then as above."""
    pause_while_starting()
    try:
        counting.clear()
        kept = [[] for _ in range(2 * YOUNG_OBJECTS)]
        assert (len(kept), counting) == (2 * YOUNG_OBJECTS, [])
    finally:
        with QuietGc(lambda: 0, look_every_s=WAIT_S):
            assert gc.isenabled()
