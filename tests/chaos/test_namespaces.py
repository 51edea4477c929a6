"""Cables that lose what is on them: expert workers in network namespaces of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.chaos.harness import faults, namespaces
from tests.chaos.harness.checks import wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh, mesh_in_namespaces
from tests.chaos.harness.namespaces import Wire
from tests.chaos.harness.queued_bytes import QueuedBytes
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge, suffer
from tests.chaos.harness.table import Row
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

TIMES = 10
FOUND_S = 0.25
FOUND_IDLE_S = 1.5
RECOVERED_S = 5.0
RESET_S = 0.3
NARROW_S = 5.0
ROW_BYTES = 4 * MIXTRAL.hidden_size + 64
"""Of a row in a call: float32, and its share of everything else."""

Condition = Callable[[Wire], AbstractContextManager[None]]


def _calls_lost(wire: Wire) -> AbstractContextManager[None]:
    return wire.losing(requests=True)


def _replies_lost(wire: Wire) -> AbstractContextManager[None]:
    return wire.losing(replies=True)


@pytest.fixture(scope="module")
def wired(tiny_mixtral: Path) -> Iterator[Mesh]:
    """Three expert workers with two copies of each expert, behind cables."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with mesh_in_namespaces(tiny_mixtral) as mesh:
        yield mesh


@pytest.fixture
def nothing_left(wired: Mesh) -> Iterator[None]:
    """Fails a test after which an expert worker keeps streams that nobody uses any more."""
    yield
    poll(
        lambda: all(worker.state().load.streams == 1 for worker in wired.workers),
        timeout_s=15.0,
        what="expert workers close streams that were lost",
    )


def test_left_behind() -> None:
    """What a run that was killed has left behind is removed by the next one."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"{namespaces.PREFIX}{dead.pid}x0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with namespaces.namespaces(1) as (wire,):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        assert left not in listed.stdout
        assert wire.name in listed.stdout


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("name", "condition"),
    [
        pytest.param("cable unplugged", Wire.unplugged, id="unplugged"),
        pytest.param("calls are lost", _calls_lost, id="calls"),
        pytest.param("replies are lost", _replies_lost, id="replies"),
    ],
)
def test_silence(
    name: str, condition: Condition, wired: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """Nothing comes from one of three, and no connection ends: it is found by its silence."""
    row = Row(f"{name} for {faults.CUT_S:g} s, 1 of 3", times=TIMES)
    table.append(row)
    suffer(wired, faults.wired(condition), row, traffic, seed=31)
    assert row.stall_worst_s <= FOUND_S
    assert max(row.recoveries_s) <= faults.CUT_S + RECOVERED_S


@pytest.mark.usefixtures("nothing_left")
def test_resets(wired: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Everything that is said to one of three is answered by a reset for a moment."""
    row = Row(f"resets for {RESET_S:g} s, 1 of 3", times=TIMES)
    table.append(row)
    suffer(wired, faults.wired(Wire.resetting, RESET_S), row, traffic, seed=32)
    assert row.stall_worst_s <= FOUND_S


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("percent", [1, 5, 10])
def test_loss(percent: int, wired: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """Some packets to and from one of three are lost; TCP sends them again, later."""
    row = Row(f"{percent} % of packets lost for {faults.CUT_S:g} s, 1 of 3", times=TIMES)
    table.append(row)

    def lossy(wire: Wire) -> AbstractContextManager[None]:
        return wire.losing(requests=True, replies=True, percent=percent)

    suffer(wired, faults.wired(lossy), row, traffic, seed=33)


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param(Wire.unplugged, id="unplugged"),
        pytest.param(_calls_lost, id="calls"),
        pytest.param(_replies_lost, id="replies"),
    ],
)
def test_silence_without_traffic(condition: Condition, wired: Mesh, table: list[Row]) -> None:
    """The gateway says of each in turn that it cannot be used, though nobody wants anything."""
    row = Row("silence without traffic, 1 of 3", times=len(wired.workers))
    table.append(row)
    found_s = []
    for wire in wired.wires.values():
        with condition(wire):
            found_s.append(_found_s(wired))
        wired.wait_all_ready()
    row.note = f"found within {max(found_s):.2f} s"
    assert max(found_s) <= FOUND_IDLE_S


def _found_s(mesh: Mesh) -> float:
    return poll(lambda: set(mesh.states()) != {"ready"}, timeout_s=10.0, what="it is found")


@pytest.mark.usefixtures("nothing_left")
def test_narrow(wired: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """All cables carry 1 Mbit/s: the mesh waits for them, and piles nothing up in front of them."""
    row = Row(f"1 Mbit/s for {NARROW_S:g} s, 3 of 3", times=1)
    table.append(row)
    bound = max(worker.state().row_credits for worker in wired.workers) * ROW_BYTES
    hosts = [wire.host for wire in wired.wires.values()]
    with Load([wired.api.port], traffic.workload, NUM_STREAMS) as load, QueuedBytes(hosts) as queue:
        load.wait_tokens(RUNNING_TOKENS)
        with ExitStack() as stack:
            for wire in wired.wires.values():
                stack.enter_context(wire.narrow(1))
            time.sleep(NARROW_S)
        load.wait_tokens(RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(wired.api)
    row.note = f"{queue.most} bytes wait at most, {bound} may"
    judge(streams, traffic.expected, row)
    assert 0 < queue.most <= bound
