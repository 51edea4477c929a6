"""Asks for more or fewer expert workers, one turn at a time, while this gateway leads.

    up      written at once
    down    the expert worker that will go hands over first; then it is written

What is kept from turn to turn are samples and a hand-over that is under way. Another leader begins
without them, from what it reads and what expert workers report.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.report import PlacementReport
from gateway.placement.state import Rescale
from gateway.scaling.fleet import Members, fleet_of, members_of, serving
from gateway.scaling.load_meter import LoadMeter
from gateway.scaling.policy import Decision, Direction, Fleet, Reason, Sample, ScalingPolicy, decide
from gateway.scaling.scale_target import Scale, ScaleError, ScaleTarget

logger = logging.getLogger("gateway.scaling")

HAND_OVER_S = 300.0
"""An expert worker that has not handed over for so long stays."""
_BOOT_PATIENCE_S = 600.0
"""Load is balanced again if those who were asked for do not come for so long."""
_MOST_SAMPLES = 4096
_STEADY = Decision("stay", "steady", 0, "")


class Placement(Protocol):
    """Who leads, and moves experts. Methods may be called from any thread."""

    @property
    def token(self) -> int | None:
        """Fencing token of this gateway; None while it does not lead."""

    def report(self) -> PlacementReport:
        """How things are."""

    def rescale(self, change: Rescale) -> None:
        """Tells of a change of the number of expert workers that is under way."""


@dataclass(frozen=True)
class ScalingReport:
    """The scaling at one moment, for metrics."""

    fleet: Fleet | None = None
    """None while this gateway does not lead, or cannot read it."""
    sample: Sample | None = None
    """The latest one."""
    decisions: Mapping[tuple[Direction, Reason], int] = field(default_factory=dict)
    """How often each was made after another one."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failed turns by cause."""


@dataclass(frozen=True)
class _HandOver:
    """An expert worker is to go."""

    num_workers: int
    """That are left then."""
    began_s: float


class Autoscaler:
    """Owned by one task; `report` may be called from any thread.

    Args:
        name: Of the StatefulSet.
        target: Its number of pods.
        workers: Tells the expert workers that answer and fit.
        placement: Who leads, and has experts handed over.
        policy: When and how much.
    """

    def __init__(
        self,
        name: str,
        target: ScaleTarget,
        workers: Callable[[], Sequence[KnownWorker]],
        placement: Placement,
        policy: ScalingPolicy,
    ) -> None:
        self._name = name
        self._target = target
        self._workers = workers
        self._placement = placement
        self._policy = policy
        self._meter = LoadMeter()
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._hand_over: _HandOver | None = None
        self._decision = _STEADY
        self._failing = ""
        self._numbers = (0, 0)  # desired and present
        self._changed_s = 0.0
        self._decisions: Counter[tuple[Direction, Reason]] = Counter()
        self._errors: Counter[str] = Counter()
        self._report = ScalingReport()

    def report(self) -> ScalingReport:
        """How things are."""
        return self._report

    async def turn(self, now_s: float) -> None:
        """Looks, decides, and does what can be done now.

        Args:
            now_s: On a monotonic clock.
        """
        token = self._placement.token
        fleet = None
        if token is None:
            self._forget()
        else:
            try:
                fleet = await self._lead(token, now_s)
            except ScaleError as error:
                self._tell_failure(error)
            else:
                self._tell_success()
        latest = self._samples[-1] if self._samples else None
        self._report = ScalingReport(fleet, latest, dict(self._decisions), dict(self._errors))

    async def _lead(self, token: int, now_s: float) -> Fleet:
        scale = await self._target.read()
        members = members_of(self._name, self._workers())
        self._keep_hand_over(scale, now_s)
        staying = self._num_staying(scale)
        fleet = fleet_of(members, scale.replicas, staying, self._placement.report())
        self._take_sample(serving(members, staying), fleet, now_s)
        decision = decide(self._samples, fleet, self._policy, now_s)
        self._tell(decision, scale)
        if wanted := self._next(decision, fleet, members, now_s):
            await self._write(wanted, scale, token)
            scale = Scale(wanted, "")
        self._note_change((scale.replicas, fleet.present), now_s)
        self._tell_placement(members, scale, now_s)
        return fleet

    def _next(self, decision: Decision, fleet: Fleet, members: Members, now_s: float) -> int | None:
        """The number to write now; None for none."""
        if decision.direction == "up":
            self._hand_over = None
            return decision.num_workers
        if decision.direction == "down" and self._hand_over is None:
            self._hand_over = _HandOver(decision.num_workers, now_s)
        if self._hand_over is None:
            return None
        if decision.reason == "booting" or fleet.num_uncovered or not fleet.can_shrink:
            logger.info("scaling: nobody goes after all: %s", decision.why or decision.reason)
            self._hand_over = None
            return None
        num_left = self._hand_over.num_workers
        leaving = [worker for ordinal, worker in members.items() if ordinal >= num_left]
        if any(worker.view.resident or worker.view.retiring for worker in leaving):
            return None
        self._hand_over = None
        return num_left

    def _keep_hand_over(self, scale: Scale, now_s: float) -> None:
        """Gives up a hand-over that takes too long, or that somebody else has overtaken."""
        if self._hand_over is None:
            return
        if self._hand_over.num_workers >= scale.replicas:
            self._hand_over = None
        elif now_s - self._hand_over.began_s > HAND_OVER_S:
            self._samples.clear()  # it is tried again when there was reason to for as long again
            self._hand_over = None
            self._errors["hand_over"] += 1
            logger.warning("scaling: experts were not handed over within %.0f s", HAND_OVER_S)

    def _num_staying(self, scale: Scale) -> int:
        return scale.replicas if self._hand_over is None else self._hand_over.num_workers

    def _take_sample(self, present: Members, fleet: Fleet, now_s: float) -> None:
        load = self._meter.look(list(present.values()))
        if load is not None:
            self._samples.append(
                Sample(now_s, fleet.desired, fleet.present, load.busy, load.wait_s)
            )
        while self._samples and self._samples[0].at_s < now_s - 2 * self._policy.busy_low_s:
            self._samples.popleft()

    async def _write(self, wanted: int, scale: Scale, token: int) -> None:
        if self._placement.token != token:
            raise ScaleError("not_leading", "another gateway leads now")
        await self._target.write(wanted, scale)
        logger.info("scaling: %s has %d replicas now", self._name, wanted)

    def _note_change(self, numbers: tuple[int, int], now_s: float) -> None:
        if numbers != self._numbers:
            self._numbers, self._changed_s = numbers, now_s

    def _tell_placement(self, members: Members, scale: Scale, now_s: float) -> None:
        staying = self._num_staying(scale)
        leaving = frozenset(
            worker.view.worker_id for ordinal, worker in members.items() if ordinal >= staying
        )
        desired, present = self._numbers
        is_booting = present < desired and now_s - self._changed_s < _BOOT_PATIENCE_S
        self._placement.rescale(Rescale(leaving, bool(leaving) or is_booting))

    def _forget(self) -> None:
        """Another one leads: what was measured is of no use."""
        self._samples.clear()
        self._meter.forget()
        self._hand_over = None
        self._decision = _STEADY
        self._placement.rescale(Rescale())

    def _tell(self, decision: Decision, scale: Scale) -> None:
        """That a decision is another one than before."""
        made = (decision.direction, decision.reason)
        if made == (self._decision.direction, self._decision.reason):
            return
        self._decision = decision
        self._decisions[made] += 1
        change = f"stays at {scale.replicas}"
        if decision.direction != "stay":
            change = f"{decision.direction} from {scale.replicas} to {decision.num_workers}"
        why = f": {decision.why}" if decision.why else ""
        logger.info("scaling: %s expert workers (%s)%s", change, decision.reason, why)

    def _tell_failure(self, error: ScaleError) -> None:
        self._errors[error.cause] += 1
        if error.cause != self._failing:
            logger.warning("scaling: %s; trying on", error)
        self._failing = error.cause

    def _tell_success(self) -> None:
        if self._failing:
            logger.info("scaling: goes on")
        self._failing = ""
