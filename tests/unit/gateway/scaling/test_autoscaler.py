"""Turns of the autoscaler, on a simulated cluster with a real leader that moves experts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from bench.scaling_day.cluster import NAME, STEP_S, Cluster
from gateway.scaling.autoscaler import HAND_OVER_S, Autoscaler
from gateway.scaling.policy import ScalingPolicy
from gateway.scaling.scale_target import Scale

IDLE, BUSY = 0.3, 20.0
POLICY = ScalingPolicy(min_workers=2, max_workers=8)
SOME_MINUTES = 15


class EventfulCluster(Cluster):
    """Things happen in the middle of a turn.

    Attributes:
        after_read: Happen once, before the autoscaler goes on with what it has read.
        before_write: Happen once, before what it writes arrives.
    """

    def __init__(self, num_pods: int) -> None:
        super().__init__(num_pods)
        self.after_read: list[Callable[[], None]] = []
        self.before_write: list[Callable[[], None]] = []

    async def read(self) -> Scale:
        """As a ScaleTarget."""
        found = await super().read()
        while self.after_read:
            self.after_read.pop()()
        return found

    async def write(self, replicas: int, seen: Scale) -> None:
        """As a ScaleTarget."""
        while self.before_write:
            self.before_write.pop()()
        await super().write(replicas, seen)

    def elect(self, token: int) -> None:
        """Somebody leads the placement from now on, with this token."""
        self.token = token


class Drive:
    """A cluster and its autoscaler, in made-up time."""

    def __init__(self, num_pods: int) -> None:
        self.cluster = EventfulCluster(num_pods)
        self.autoscaler = Autoscaler(
            NAME, self.cluster, self.cluster.known_workers, self.cluster, POLICY
        )

    async def step(self, work: float) -> None:
        """One turn."""
        self.cluster.step(work)
        await self.autoscaler.turn(self.cluster.now_s)

    async def run(self, work: float, minutes: float) -> None:
        """That many."""
        for _ in range(round(minutes * 60 / STEP_S)):
            await self.step(work)

    async def until(self, work: float, condition: Callable[[], bool]) -> None:
        """As many as it takes."""
        for _ in range(1000):
            if condition():
                return
            await self.step(work)
        pytest.fail("it does not come to that")

    def resident(self, ordinal: int) -> int:
        """Experts of a pod."""
        return len(self.cluster.pods[ordinal].view.resident)

    @property
    def numbers(self) -> list[int]:
        """What was written."""
        return [after for _, _, after in self.cluster.writes]


async def test_more_when_busy() -> None:
    """Asked for once while they boot; they get experts and take their share."""
    drive = Drive(4)
    await drive.run(2.0, 5)
    assert not drive.cluster.writes
    await drive.until(3.6, lambda: bool(drive.cluster.writes))
    await drive.run(3.6, 8)
    assert drive.numbers == [7]
    assert all(drive.resident(ordinal) for ordinal in range(7))
    assert drive.autoscaler.report().decisions["up", "busy"] == 1


async def test_experts_are_handed_over_before_a_pod_goes() -> None:
    """The highest ordinal first, one at a time; experts never lack a copy."""
    drive = Drive(5)
    await drive.run(IDLE, 3)
    fewest, leaving = [], set[str]()
    while drive.cluster.replicas > 3:
        await drive.step(IDLE)
        fewest.append(drive.cluster.fewest_copies())
        leaving |= drive.cluster.leaving
    assert drive.numbers == [4, 3]
    assert leaving == {f"{NAME}-4", f"{NAME}-3"}
    assert drive.cluster.num_dropped == 0
    assert min(fewest) == 2
    written_s = [at_s for at_s, _, _ in drive.cluster.writes]
    assert written_s[1] - written_s[0] >= POLICY.busy_low_s


async def test_coverage_keeps_them() -> None:
    """Three hold two copies of each expert, two would not: idle as they are, three stay."""
    drive = Drive(3)
    await drive.run(IDLE, 30)
    assert not drive.cluster.writes
    assert drive.autoscaler.report().decisions == {("stay", "copies"): 1}


async def test_load_that_comes_back_ends_a_hand_over() -> None:
    """Who was about to go gets its experts again."""
    drive = Drive(5)
    await drive.run(IDLE, 3)
    before = drive.resident(4)
    drive.cluster.moves_per_step = 1
    await drive.until(IDLE, lambda: drive.resident(4) < before)
    assert drive.cluster.leaving == {f"{NAME}-4"}
    drive.cluster.moves_per_step = 0
    await drive.until(4.5, lambda: not drive.cluster.leaving)
    drive.cluster.moves_per_step = 32
    await drive.run(4.5, 1)
    assert drive.resident(4) >= before
    assert min(drive.numbers) > 5
    assert not drive.autoscaler.report().errors


async def test_a_hand_over_that_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    """Is given up, said, and tried again later; nothing is written."""
    drive = Drive(5)
    await drive.run(IDLE, 5)
    drive.cluster.moves_per_step = 0
    await drive.until(IDLE, lambda: bool(drive.cluster.leaving))
    began_s = drive.cluster.now_s
    with caplog.at_level(logging.WARNING):
        await drive.until(IDLE, lambda: not drive.cluster.leaving)
    assert drive.cluster.now_s - began_s == pytest.approx(HAND_OVER_S, abs=3 * STEP_S)
    assert "not handed over within 300 s" in caplog.text
    assert drive.autoscaler.report().errors == {"hand_over": 1}
    assert not drive.cluster.writes
    drive.cluster.moves_per_step = 32
    await drive.until(IDLE, lambda: drive.numbers == [4])


async def test_only_the_leader_asks() -> None:
    """Others read nothing, and one that is replaced begins anew."""
    drive = Drive(4)
    drive.cluster.token = None
    drive.cluster.is_cut_off = True
    await drive.run(BUSY, SOME_MINUTES)
    assert not drive.cluster.writes
    assert not drive.autoscaler.report().errors
    assert drive.autoscaler.report().fleet is None
    drive.cluster.token, drive.cluster.is_cut_off = 7, False
    await drive.step(BUSY)
    await drive.step(BUSY)
    assert not drive.cluster.writes
    await drive.until(BUSY, lambda: bool(drive.cluster.writes))


async def test_a_leader_that_is_replaced_while_it_reads_does_not_write() -> None:
    """What it decided is dropped."""
    drive = Drive(1)
    drive.cluster.after_read.append(lambda: drive.cluster.elect(2))
    await drive.step(IDLE)
    assert not drive.cluster.writes
    assert drive.autoscaler.report().errors == {"not_leading": 1}
    await drive.step(IDLE)
    assert drive.numbers == [3]


async def test_failures_are_told_once_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    """They are tried again with every turn; load goes on to be measured afterwards."""
    drive = Drive(4)
    with caplog.at_level(logging.INFO, "gateway.scaling"):
        drive.cluster.is_cut_off = True
        await drive.run(IDLE, 1)
        drive.cluster.is_cut_off = False
        await drive.step(IDLE)
        drive.cluster.is_cut_off = True
        await drive.step(IDLE)
    messages = [record.message for record in caplog.records]
    failure = "scaling: the API server does not answer; trying on"
    assert messages == [failure, "scaling: goes on", failure]
    assert drive.autoscaler.report().errors == {"unreachable": round(60 / STEP_S) + 1}


async def test_what_others_wrote_is_not_overwritten() -> None:
    """A number that was changed since it was read is read again first."""
    drive = Drive(1)
    drive.cluster.before_write.append(lambda: drive.cluster.scale(6))
    await drive.step(IDLE)
    assert drive.cluster.replicas == 6
    assert not drive.cluster.writes
    assert drive.autoscaler.report().errors == {"409": 1}
    await drive.step(IDLE)
    assert drive.cluster.replicas == 6


async def test_somebody_else_scales() -> None:
    """Its number is the one to begin from."""
    drive = Drive(4)
    await drive.run(2.0, 5)
    drive.cluster.scale(6)
    await drive.run(2.0, 5)
    fleet = drive.autoscaler.report().fleet
    assert fleet is not None
    assert (fleet.desired, fleet.present) == (6, 6)
    assert not drive.cluster.writes


async def test_load_is_left_alone_while_they_come_and_go() -> None:
    """But not for ever, if those that were asked for do not come."""
    drive = Drive(4)
    await drive.run(1.5, 2)
    assert not drive.cluster.is_changing
    drive.cluster.scale(5)
    drive.cluster.pods[4].ready_at_s = 1e9
    await drive.step(1.5)
    assert drive.cluster.is_changing
    await drive.run(1.5, 11)
    assert not drive.cluster.is_changing
