"""Words that threads share: nothing is lost, one at a time has a lock, and waits end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from expert_worker.device_turn import DeviceTurn
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.words import (
    HAS_FUTEX,
    add,
    add_word,
    get,
    give_back,
    put,
    take,
    try_take,
)

pytestmark = pytest.mark.skipif(not HAS_FUTEX, reason="locks need Linux")
SECOND_NS = 10**9


@njit
def _count(lock: int, counts: NDArray[np.int64], times: int) -> None:
    """Adds to counts[0] under the lock, and to counts[1] without."""
    atomic = np.int64(counts.ctypes.data) + 8
    for _ in range(times):
        if take(lock, 60 * SECOND_NS):
            counts[0] += 1
            give_back(lock)
        add_word(atomic, 1)


def test_threads_take_turns() -> None:
    """No addition is lost, whoever sleeps and wakes."""
    words, counts = np.zeros(8, np.int64), np.zeros(2, np.int64)
    _count(words.ctypes.data, counts, 0)  # compiled before
    threads = [
        threading.Thread(target=_count, args=(words.ctypes.data, counts, 50_000), name="test-turn")
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts.tolist() == [200_000, 200_000]
    assert words[0] == 0


def test_a_lock_that_is_taken() -> None:
    """Nobody else gets it until it is given back, and waits end in time."""
    words = np.zeros(1, np.int64)
    lock = words.ctypes.data
    assert try_take(lock)
    assert not try_take(lock)
    started_s = time.monotonic()
    assert not take(lock, SECOND_NS // 50)
    assert 0.02 <= time.monotonic() - started_s < 5
    give_back(lock)
    assert take(lock, 0)
    assert not take(lock, 0)
    give_back(lock)
    assert words[0] == 0


def test_who_waits_is_woken() -> None:
    """As soon as it is given back, not when its time is up."""
    turn = DeviceTurn()
    assert turn.take(0)
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(turn.take(60)), name="test-waiting")
    waiting.start()
    deadline_s = time.monotonic() + 20
    while get(turn.device) != 2 and time.monotonic() < deadline_s:
        waiting.join(0.001)  # until it sleeps
    turn.give_back()
    waiting.join(20)
    assert got == [True]


def test_turns_that_are_wanted() -> None:
    """Who waits for long is counted while it does; the number is right again whatever happens."""
    turn = DeviceTurn()
    got = []

    def want() -> None:
        with turn.held(10) as is_held:
            got.append(is_held)

    with turn.held(1) as is_held:
        assert is_held
        assert get(turn.wanted) == 0
        with turn.held(0.001) as is_held_twice:
            assert not is_held_twice
        waiting = threading.Thread(target=want)
        waiting.start()
        deadline_s = time.monotonic() + 10
        while get(turn.wanted) != 1 and time.monotonic() < deadline_s:
            waiting.join(0.001)
        assert get(turn.wanted) == 1
    waiting.join(10)
    assert got == [True]
    with pytest.raises(RuntimeError, match="failed"), turn.held(1):
        raise RuntimeError("failed")
    assert (get(turn.wanted), get(turn.device)) == (0, 0)


def test_words_for_python() -> None:
    """Set, added to and read."""
    words = np.zeros(3, np.int64)
    address = words.ctypes.data + 8
    put(address, 5)
    add(address, -7)
    assert get(address) == -2
    assert words.tolist() == [0, -2, 0]
