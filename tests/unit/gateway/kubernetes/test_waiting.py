"""Pauses between tries, and the thread in which they are made."""

from __future__ import annotations

import asyncio
import threading

from gateway.cluster.backoff import Backoff
from gateway.cluster.loop_thread import LoopThread


def test_pauses_double_up_to_a_limit() -> None:
    """Half of each is random, so that gateways don't ask all at once; a success begins anew."""
    backoff = Backoff(1.0, 4.0)
    for limit_s in (1.0, 2.0, 4.0, 4.0):
        assert 0.5 * limit_s <= backoff.next_s() <= limit_s
    backoff.reset()
    assert backoff.next_s() <= 1.0
    assert len({Backoff().next_s() for _ in range(20)}) > 10


def test_who_wants_to_be_left_alone_is() -> None:
    """Beyond the pause of ours; not for days, whatever a header says."""
    assert 7.5 <= Backoff(1.0, 4.0).next_s(7.0) <= 8.0
    assert Backoff(1.0, 4.0).next_s(1e9) <= 121.0


def test_a_thread_ends_once() -> None:
    """What it does at its end is done in full, however often it is stopped."""
    done: list[str] = []
    began = threading.Event()

    async def main() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            done.append("end")

    thread = LoopThread("test-loop", main)
    thread.start()
    assert began.wait(10)
    others = [threading.Thread(target=thread.stop, args=(10.0,)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(10)
        assert done == ["end"]
    thread.stop(10.0)
    assert "test-loop" not in [each.name for each in threading.enumerate()]


def test_a_thread_that_is_stopped_first_never_begins() -> None:
    """And one that ended by itself can be stopped."""
    done: list[str] = []

    async def main() -> None:
        done.append("ran")

    first = LoopThread("test-loop", main)
    first.stop(1.0)
    first.start()
    second = LoopThread("test-loop", main)
    second.start()
    second.stop(10.0)
    second.stop(10.0)
    assert len(done) <= 1
    assert "test-loop" not in [each.name for each in threading.enumerate()]
