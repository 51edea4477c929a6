"""What may happen to a mesh under load.

A fault does its harm, mends it, and returns when it was done, on the monotonic clock.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import psutil

from tests.chaos.harness.mesh import ChangeMessages, Mesh
from tests.chaos.harness.message_proxy import FORWARD, WATCH
from tests.chaos.harness.namespaces import Wire
from tests.chaos.harness.network import MessageFault
from tests.chaos.harness.pool import HOST, PoolWorker, start_all
from tests.chaos.harness.replies import WRONG_REPLIES, BitFlip, Sometimes
from tests.support.processes import poll, processes_of

Fault = Callable[[Mesh, random.Random], float]

HANG_S, CUT_S, STARVED_S, EXHAUSTED_S = 2.0, 2.0, 5.0, 3.0
NUM_STRANGERS, SPARE_FDS = 60, 4
"""Of a flood: connections to each port, and how many descriptors there are for them."""
WRONG_S = 0.3
"""For which replies may be wrong, after the first one."""
RETRIED_WITHIN_S = 60.0
"""A worker that was left alone for what it answered is asked again long before."""


def kill(mesh: Mesh, chance: random.Random) -> float:
    """kill -9 of a worker, which is started again at once."""
    victim = chance.choice(mesh.workers)
    at_s = time.monotonic()
    victim.kill()
    start_all([victim])
    return at_s


def hang(mesh: Mesh, chance: random.Random) -> float:
    """SIGSTOP of a worker, and SIGCONT later."""
    at_s = time.monotonic()
    chance.choice(mesh.workers).hang(HANG_S)
    return at_s


def kill_two(mesh: Mesh, chance: random.Random) -> float:
    """A second after each other, so that the second dies while the first is made up for."""
    victims = chance.sample(mesh.workers, 2)
    at_s = time.monotonic()
    for victim in victims:
        victim.kill()
        victim.start()
        time.sleep(1.0)
    for victim in victims:
        victim.wait_ready()
    return at_s


def kill_and_hang(mesh: Mesh, chance: random.Random) -> float:
    """One is killed while another hangs."""
    first, second = chance.sample(mesh.workers, 2)
    at_s = time.monotonic()
    first.kill()
    first.start()
    second.hang(HANG_S)
    first.wait_ready()
    return at_s


def kill_attention_worker(mesh: Mesh, chance: random.Random) -> float:
    """Its gateway starts another one."""
    at_s = time.monotonic()
    for process in processes_of(mesh.server.process.marker):
        if "attention_worker" in process.cmdline():
            process.kill()
    poll(lambda: mesh.api.ready().status == 503, timeout_s=10.0, what="/ready is 503")
    poll(lambda: mesh.api.ready().status == 200, timeout_s=60.0, what="/ready is 200")
    return at_s


def starve(mesh: Mesh, chance: random.Random) -> float:
    """Other processes take the cores."""
    at_s = time.monotonic()
    busy = [
        subprocess.Popen(["timeout", str(STARVED_S), "sh", "-c", "while :; do :; done"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    for process in busy:
        process.wait()
    return at_s


def exhaust_worker(mesh: Mesh, chance: random.Random) -> float:
    """A worker can open no more descriptors, and strangers connect to both of its ports."""
    victim = chance.choice(mesh.workers)
    process = psutil.Process(victim.pid)
    ports = (victim.port, victim.direct_port)
    return _exhaust(victim.pid, ports, lambda most: process.num_fds() >= most)


def exhaust_gateway(mesh: Mesh, chance: random.Random) -> float:
    """The gateway can open no more descriptors, and strangers connect to its HTTP port."""
    before = num_turned_away(mesh)
    return _exhaust(
        mesh.server.process.process.pid,
        (mesh.api.port,),
        lambda _most: num_turned_away(mesh) >= before + NUM_STRANGERS,
    )


def num_turned_away(mesh: Mesh) -> float:
    """Connections too many that the gateway had."""
    return mesh.api.metrics()["moe_connections_turned_away_total"]


def _exhaust(pid: int, ports: Sequence[int], is_exhausted: Callable[[int], bool]) -> float:
    """Leaves a process few descriptors for a while.

    Args:
        pid: Of it.
        ports: Where strangers connect.
        is_exhausted: Whether that has come to something; told how many descriptors there are.
    """
    at_s = time.monotonic()
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    most = psutil.Process(pid).num_fds() + SPARE_FDS
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with ExitStack() as strangers:
            for port in ports:
                for _ in range(NUM_STRANGERS):
                    strangers.enter_context(socket.create_connection((HOST, port), HANG_S))
            poll(lambda: is_exhausted(most), timeout_s=10.0, what="no descriptor is left")
            time.sleep(EXHAUSTED_S)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    return at_s


# --- networks; of a mesh that has one ---


def cut(mesh: Mesh, chance: random.Random) -> float:
    """The line to a worker is cut, and mended later."""
    return _for_a_while(mesh, chance.choice(mesh.workers), is_cut=True)


def delay(mesh: Mesh, chance: random.Random) -> float:
    """The line to a worker takes 100 ms each way."""
    return _for_a_while(mesh, chance.choice(mesh.workers), latency_s=0.1)


def throttle(mesh: Mesh, chance: random.Random) -> float:
    """The line to a worker carries 100 kB/s."""
    return _for_a_while(mesh, chance.choice(mesh.workers), bytes_per_s=1e5)


def _for_a_while(mesh: Mesh, worker: PoolWorker, **conditions: object) -> float:
    at_s = time.monotonic()
    with mesh.line(worker).under(**conditions):
        time.sleep(CUT_S)
    return at_s


def reset(mesh: Mesh, chance: random.Random) -> float:
    """All connections to a worker are reset."""
    at_s = time.monotonic()
    mesh.reset(chance.choice(mesh.workers))
    return at_s


def break_in_a_reply(mesh: Mesh, chance: random.Random) -> float:
    """A direct connection is lost when a part of a reply has come."""
    at_s = time.monotonic()
    with mesh.line(chance.choice(mesh.workers)).under(reply_bytes_left=chance.randrange(1, 2000)):
        time.sleep(WRONG_S)
    return at_s


# --- cables to namespaces; of a mesh that has them ---


def wired(condition: Callable[[Wire], AbstractContextManager[None]], for_s: float = CUT_S) -> Fault:
    """Something is wrong with the cable to a worker for a while."""

    def fault(mesh: Mesh, chance: random.Random) -> float:
        at_s = time.monotonic()
        with condition(mesh.wires[chance.choice(mesh.workers)]):
            time.sleep(for_s)
        return at_s

    return fault


# --- wrong replies ---


def wrong_replies(names: Sequence[str], *, direct: bool) -> Fault:
    """Some replies of a worker are wrong in one of these ways, each time in the next one.

    Args:
        names: Of `WRONG_REPLIES`.
        direct: On direct connections, of a mesh with a network; else over gRPC, with proxies.
    """
    turns = itertools.cycle([Sometimes(WRONG_REPLIES[name]()) for name in names])

    def fault(mesh: Mesh, chance: random.Random) -> float:
        change_replies = mesh.change_direct_replies if direct else mesh.change_replies(FORWARD)
        return _wrong_for_a_while(chance.choice(mesh.workers), change_replies, next(turns))

    return fault


def flipped_requests(*, direct: bool) -> Fault:
    """Some calls come to a worker with another bit than they left with.

    Args:
        direct: As for wrong replies.
    """
    change = Sometimes(BitFlip())

    def fault(mesh: Mesh, chance: random.Random) -> float:
        change_calls = mesh.change_direct_requests if direct else mesh.change_requests(FORWARD)
        return _wrong_for_a_while(chance.choice(mesh.workers), change_calls, change)

    return fault


def _wrong_for_a_while(
    victim: PoolWorker, change_messages: ChangeMessages, change: Sometimes
) -> float:
    at_s, before = time.monotonic(), change.num_changed
    with change_messages(victim, change):
        poll(lambda: change.num_changed > before, timeout_s=RETRIED_WITHIN_S, what="one comes")
        time.sleep(WRONG_S)
    return at_s


def wrong_states(change: MessageFault) -> Fault:
    """The state that a worker reports is changed until the gateway takes no more to do with it."""

    def fault(mesh: Mesh, chance: random.Random) -> float:
        at_s = time.monotonic()
        with mesh.change_replies(WATCH)(chance.choice(mesh.workers), change):
            poll(lambda: "incompatible" in mesh.states(), timeout_s=20.0, what="it is named")
        return at_s

    return fault
