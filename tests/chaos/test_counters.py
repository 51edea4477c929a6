"""Whether metrics tell of faults what a network between gateway and expert workers saw of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.chaos.harness.checks import wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.pool import PoolWorker, start_all
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.processes import poll

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TIMES = 20
SETTLED_AFTER = 60
"""Looks, one each 20 ms, that see the same: reports come twice a second."""
COUNTERS = {
    "answers": "moe_dispatch_duration_seconds_count",
    "faults": "moe_dispatch_faults_total",
    "retries": "moe_dispatch_retries_total",
    "hedges": "moe_dispatch_hedges_total",
    "late": "moe_dispatch_late_replies_total",
    "ejections": "moe_dispatch_ejections_total",
    "damaged": "moe_dispatch_damaged_total",
}


class Toll:
    """Counts calls and replies on the line to one expert worker, and kills it within a call.

    Args:
        worker: At the far end.
    """

    def __init__(self, worker: PoolWorker) -> None:
        self.worker = worker
        self.num_calls = 0
        self.num_replies = 0
        """That were passed on."""
        self._is_armed = False
        self._killed = threading.Event()

    def on_call(self, message: bytes) -> Sequence[bytes]:
        """A call passes."""
        self.num_calls += 1
        return (message,)

    def on_reply(self, message: bytes) -> Sequence[bytes]:
        """A reply passes, unless the expert worker is to die before it was heard."""
        if self._is_armed and not self._killed.is_set():
            self.worker.kill()
            self._killed.set()
        if self._killed.is_set():
            return ()
        self.num_replies += 1
        return (message,)

    def kill_within_a_call(self) -> None:
        """Returns when it serves again."""
        self._killed.clear()
        self._is_armed = True
        poll(self._killed.is_set, timeout_s=30.0, what="it is asked something")
        self.worker.process.process.wait(10.0)
        self._is_armed = False
        self._killed.clear()  # before the next life is asked
        start_all([self.worker])


def test_counters(networked: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Each kill hits a call that was sent and not answered. Of the calls that passed the network:

    * answered ones are answers, or late replies, in the metrics;
    * each other one is a fault: it was asked of others then, a retry, unless it had been hedged
      before it was lost, or was the hedge itself;
    * each further fault was a late one that was hedged; nothing was damaged, and nobody ejected.
    """
    row = Row("kill -9 within a call, 1 of 3", times=TIMES)
    table.append(row)
    chance = random.Random(61)
    tolls = [Toll(worker) for worker in networked.workers]
    with ExitStack() as stack:
        for toll in tolls:
            line = networked.line(toll.worker)
            stack.enter_context(line.under(request_fault=toll.on_call, reply_fault=toll.on_reply))
        before = _counters(networked)
        with Load([networked.api.port], traffic.workload, NUM_STREAMS) as load:
            for _ in range(TIMES):
                load.wait_tokens(RUNNING_TOKENS)
                chance.choice(tolls).kill_within_a_call()
                networked.wait_all_ready()
            load.wait_tokens(RUNNING_TOKENS)
            streams = load.finish()
        wait_idle(networked.api)
        num_replies = sum(toll.num_replies for toll in tolls)
        num_lost = sum(toll.num_calls for toll in tolls) - num_replies

        found = _settled(networked, before)
    row.note = f"{num_lost} calls lost, {num_replies} replies; " + ", ".join(
        f"{count:.0f} {name}" for name, count in found.items()
    )
    judge(streams, traffic.expected, row)
    assert num_lost >= TIMES
    assert found["answers"] + found["late"] == num_replies
    assert found["retries"] <= num_lost <= found["faults"] <= num_lost + found["hedges"]
    assert found["retries"] + found["hedges"] <= found["faults"]
    assert (found["ejections"], found["damaged"]) == (0, 0)


def _counters(mesh: Mesh) -> dict[str, float]:
    samples = mesh.api.metrics()
    return {name: samples.get(sample, 0.0) for name, sample in COUNTERS.items()}


def _settled(mesh: Mesh, before: dict[str, float]) -> dict[str, float]:
    """What was counted since, once attention workers have reported all of it."""
    found: list[dict[str, float]] = [before]

    def is_settled() -> bool:
        found.append(_counters(mesh))
        return len(found) > SETTLED_AFTER and found[-1] == found[-SETTLED_AFTER]

    poll(is_settled, timeout_s=20.0, what="nothing more is reported")
    return {name: found[-1][name] - before[name] for name in COUNTERS}
