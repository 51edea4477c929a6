"""Sockets and the clock, called by compiled code."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.sockets import monotonic_ns, poll, receive, send

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_bytes_go_and_come(pair: Pair) -> None:
    """Where they belong, and no others."""
    ours, theirs = pair
    sent, got = np.arange(10, dtype=np.uint8), np.full(10, 99, np.uint8)
    assert send(ours.fileno(), sent, 2, 5) == 5
    assert receive(theirs.fileno(), got, 3, 7) == 5
    assert got.tolist() == [99, 99, 99, 2, 3, 4, 5, 6, 99, 99]


def test_ends_and_errors(pair: Pair) -> None:
    """The end of a connection is 0, whatever fails is its errno, and no signal ends the process."""
    ours, theirs = pair
    buffer = np.zeros(4, np.uint8)
    theirs.setblocking(False)
    assert receive(theirs.fileno(), buffer, 0, 4) == -errno.EAGAIN
    ours.shutdown(socket.SHUT_RDWR)
    assert receive(theirs.fileno(), buffer, 0, 4) == 0
    assert send(ours.fileno(), buffer, 0, 4) == -errno.EPIPE
    assert receive(-1, buffer, 0, 4) == -errno.EBADF


def test_full_socket(pair: Pair) -> None:
    """One that does not block takes what fits."""
    ours, _ = pair
    ours.setblocking(False)
    buffer = np.zeros(2**24, np.uint8)
    assert 0 < send(ours.fileno(), buffer, 0, buffer.size) < buffer.size
    while (taken := send(ours.fileno(), buffer, 0, buffer.size)) > 0:
        pass
    assert taken == -errno.EAGAIN


def _poll(fds: list[int], events: int, timeout_ms: int) -> tuple[int, list[int]]:
    revents = np.full(len(fds), -1, np.int64)
    wanted = np.full(len(fds), events, np.int64)
    return poll(np.array(fds, np.int64), wanted, revents, timeout_ms), revents.tolist()


def test_poll_tells_which(pair: Pair) -> None:
    """Negative descriptors are left out; a wait ends when its time is over."""
    ours, theirs = pair
    fds = [ours.fileno(), -1, theirs.fileno()]
    started_s = time.monotonic()
    assert _poll(fds, select.POLLIN, 30) == (0, [0, 0, 0])
    assert time.monotonic() - started_s > 0.025
    ours.send(b"x")
    assert _poll(fds, select.POLLIN, -1) == (1, [0, 0, select.POLLIN])
    ours.close()
    happened, revents = _poll([-1, theirs.fileno()], select.POLLOUT, 0)
    assert happened == 1
    assert revents[1] & select.POLLHUP


def test_no_gil_is_held(pair: Pair) -> None:
    """Another thread runs Python while one receives, and its shutdown ends the wait."""
    _, theirs = pair
    results: list[int] = []
    buffer = np.zeros(4, np.uint8)
    receive(-1, buffer, 0, 4)  # compiled before
    thread = threading.Thread(
        target=lambda: results.append(receive(theirs.fileno(), buffer, 0, 4)), name="test-receiver"
    )
    thread.start()
    theirs.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert results == [0]


def test_interrupted_calls_go_on(pair: Pair) -> None:
    """A signal ends neither a wait nor its time limit."""
    ours, theirs = pair
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    main = threading.get_ident()

    def interrupt() -> None:
        for _ in range(5):
            signal.pthread_kill(main, signal.SIGUSR1)
            select.select([], [], [], 0.01)
        ours.send(b"x")

    try:
        thread = threading.Thread(target=interrupt, name="test-interrupter")
        thread.start()
        assert receive(theirs.fileno(), np.zeros(4, np.uint8), 0, 4) == 1
        thread.join(10)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert _poll([theirs.fileno()], select.POLLIN, 20) == (0, [0])
    finally:
        signal.signal(signal.SIGUSR1, before)


@njit
def _now() -> int:
    return monotonic_ns()


def test_the_clock_is_that_of_python() -> None:
    """So that deadlines mean the same to both."""
    _now()  # compiled before
    before_ns = time.monotonic_ns()
    now_ns = _now()
    assert before_ns <= now_ns <= time.monotonic_ns()
