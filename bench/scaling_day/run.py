"""Runs a day through the autoscaler, and says how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.scaling_day.cluster import NAME, STEP_S, Cluster
from gateway.scaling.autoscaler import Autoscaler, ScalingReport
from gateway.scaling.policy import ScalingPolicy

POLICY = ScalingPolicy(min_workers=2, max_workers=10)
FIRST_PODS = 3
SETTLED_S = 300.0
"""The pods of the beginning are empty at first."""
FLAP_S = 600.0
"""A change in one direction so soon after one in the other is a flap."""


@dataclass(frozen=True)
class Step:
    """The cluster at the end of a step."""

    at_s: float
    work: float
    desired: int
    serving: int
    fewest_copies: int
    wait_s: float
    """That work waits for devices which are all busy."""


@dataclass(frozen=True)
class DayResult:
    """What became of a day."""

    steps: Sequence[Step]
    writes: Sequence[tuple[float, int, int]]
    """Time, number before, number after."""
    report: ScalingReport

    @property
    def reversals(self) -> int:
        """Changes of the number in the other direction than the one before."""
        return sum(1 for a, b in pairwise(self.writes) if (a[2] > a[1]) != (b[2] > b[1]))

    @property
    def flaps(self) -> int:
        """Those of them that came soon."""
        return sum(
            1 for a, b in pairwise(self.writes)
            if (a[2] > a[1]) != (b[2] > b[1]) and b[0] - a[0] < FLAP_S
        )  # fmt: skip

    @property
    def worker_hours(self) -> float:
        """Asked for, over the day."""
        return sum(step.desired for step in self.steps) * STEP_S / 3600

    def share_waiting(self, longer_than_s: float) -> float:
        """Share of the day in which work waited for longer than that."""
        return sum(step.wait_s > longer_than_s for step in self.steps) / len(self.steps)


def run_day(day: Sequence[float], policy: ScalingPolicy = POLICY) -> DayResult:
    """A day from its first to its last minute.

    Args:
        day: [minutes] work.
        policy: Limits and times.
    """
    cluster = Cluster(FIRST_PODS)
    autoscaler = Autoscaler(NAME, cluster, cluster.known_workers, cluster, policy)
    return asyncio.run(_run(day, cluster, autoscaler))


async def _run(day: Sequence[float], cluster: Cluster, autoscaler: Autoscaler) -> DayResult:
    steps = []
    for work in day:
        for _ in range(round(60 / STEP_S)):
            cluster.step(work)
            await autoscaler.turn(cluster.now_s)
            steps.append(
                Step(
                    cluster.now_s,
                    work,
                    cluster.replicas,
                    cluster.num_serving(),
                    cluster.fewest_copies(),
                    cluster.wait_s,
                )
            )
    return DayResult(steps, cluster.writes, autoscaler.report())
