"""Expert workers that come, serve, hand over and go, in steps of a few seconds of made-up time.

What decides is real: the autoscaler, and the leader that moves experts. Simulated are pods (they
boot for a time that differs), the loading of experts, and how the work of a day keeps devices busy
and makes calls wait.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from expertmesh.call_waits import WAIT_BOUNDS_S
from gateway.mesh.worker_report import KnownWorker, WorkCounters
from gateway.placement.leader import Leader
from gateway.placement.report import PlacementReport
from gateway.placement.state import Experts, Order, PlacementPolicy, Rescale, WorkerView
from gateway.scaling.scale_target import Scale, ScaleError

NAME = "expert-worker"
STEP_S = 10.0
BOOT_S = (60.0, 150.0)
"""A pod is scheduled, reads its model and warms up for so long, shortest and longest."""
NUM_SLOTS = 48
EXPERTS = Experts(tuple(range(4)), 16, 10 << 20)
PLACEMENT = PlacementPolicy(min_copies=2)
_CALL_S = 0.002
_CALLS_PER_STEP = 2000


@dataclass
class Pod:
    """One of the StatefulSet."""

    ordinal: int
    ready_at_s: float
    view: WorkerView
    work: WorkCounters = field(
        default_factory=lambda: WorkCounters(0.0, 0.0, (0,) * (len(WAIT_BOUNDS_S) + 1))
    )
    orders: list[Order] = field(default_factory=list)

    def serves(self, now_s: float) -> bool:
        """True once it has booted."""
        return now_s >= self.ready_at_s


class Cluster:
    """The StatefulSet, its pods, and the leader that places experts.

    It is what the autoscaler knows of the world: who is there, what is placed, what is asked for.

    Args:
        num_pods: That have booted at the beginning.
        seed: Of the times that pods boot.
    """

    def __init__(self, num_pods: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._version = 0
        self._num_born = 0
        self._leader = Leader(EXPERTS, PLACEMENT, token=1)
        self._change = Rescale()
        self._placed: list[WorkerView] = []
        self._backlog_s = 0.0
        self._report = PlacementReport(EXPERTS, PLACEMENT)
        self.token: int | None = 1
        self.is_cut_off = False
        """The API server cannot be reached."""
        self.moves_per_step = 32
        """Experts that an expert worker loads or unloads in a step."""
        self.now_s = 0.0
        self.replicas = num_pods
        self.num_dropped = 0
        """Experts that pods held when they were taken away."""
        self.writes: list[tuple[float, int, int]] = []
        """Time, number before, number after."""
        self.pods: dict[int, Pod] = {}
        for ordinal in range(num_pods):
            self._boot(ordinal, 0.0)

    # --- what the autoscaler sees

    async def read(self) -> Scale:
        """As a ScaleTarget."""
        if self.is_cut_off:
            raise ScaleError("unreachable", "the API server does not answer")
        return Scale(self.replicas, str(self._version))

    async def write(self, replicas: int, seen: Scale) -> None:
        """As a ScaleTarget."""
        if seen.version != str(self._version):
            raise ScaleError("409", "somebody has written")
        self.writes.append((self.now_s, self.replicas, replicas))
        self.scale(replicas)

    async def close(self) -> None:
        """As a ScaleTarget."""

    def scale(self, replicas: int) -> None:
        """Asks for so many pods, as anybody may."""
        self._version += 1
        self.replicas = replicas
        for ordinal in [ordinal for ordinal in self.pods if ordinal >= replicas]:
            self.num_dropped += len(self.pods.pop(ordinal).view.resident)
        for ordinal in range(replicas):
            if ordinal not in self.pods:
                self._boot(ordinal, self._random.uniform(*BOOT_S))

    def known_workers(self) -> Sequence[KnownWorker]:
        """Those that have booted."""
        return [KnownWorker("", pod.view, {}, pod.work) for pod in self._serving()]

    def report(self) -> PlacementReport:
        """What is resident."""
        views = tuple(pod.view for pod in self._serving())
        if views != self._report.workers:
            self._report = replace(self._report, workers=views)
        return self._report

    def rescale(self, change: Rescale) -> None:
        """Who is to hand over."""
        self._change = change

    @property
    def leaving(self) -> frozenset[str]:
        """Expert workers that are to hand over."""
        return self._change.leaving

    @property
    def is_changing(self) -> bool:
        """True if nothing is to be moved for load."""
        return self._change.is_under_way

    # --- what happens

    def step(self, work: float) -> None:
        """Lets STEP_S seconds pass.

        Args:
            work: Device seconds that are asked for in a second.
        """
        self.now_s += STEP_S
        self._carry_out()
        self._place()
        self._compute(work)

    def fewest_copies(self) -> int:
        """Of the expert that has least."""
        return self.report().fewest_copies()

    def num_serving(self) -> int:
        """Pods that have booted."""
        return len(self._serving())

    @property
    def wait_s(self) -> float:
        """How long work waits for devices that are all busy."""
        return self._backlog_s / max(1, self._num_working())

    def _serving(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.serves(self.now_s)]

    def _num_working(self) -> int:
        return sum(1 for pod in self._serving() if pod.view.resident)

    def _boot(self, ordinal: int, boot_s: float) -> None:
        self._num_born += 1
        view = WorkerView(f"{NAME}-{ordinal}", self._num_born, f"node-{ordinal}", NUM_SLOTS)
        self.pods[ordinal] = Pod(ordinal, self.now_s + boot_s, view)

    def _carry_out(self) -> None:
        """Expert workers do what they were told in the step before."""
        if not self.moves_per_step:
            return
        for pod in self._serving():
            for order in [order for order in pod.orders if order in self._leader.pending]:
                keys = order.experts[: self.moves_per_step]
                is_load = order.kind == "load"
                resident = (
                    pod.view.resident | set(keys) if is_load else pod.view.resident - set(keys)
                )
                pod.view = replace(pod.view, resident=frozenset(resident))
                self._leader.ended(order, (), self.now_s)
            pod.orders = []

    def _place(self) -> None:
        ordered = {order for pod in self.pods.values() for order in pod.orders}
        for order in self._leader.pending:
            if order not in ordered:  # its pod is gone
                self._leader.lost(order, self.now_s)
        views = [
            replace(pod.view, leaving=True) if pod.view.worker_id in self.leaving else pod.view
            for pod in self._serving()
        ]
        if views == self._placed and not self._leader.pending:
            return  # it would find nothing to do
        self._placed = views
        for order in self._leader.advance(views, EXPERTS.no_load(), self.now_s):
            self.pods[int(order.worker_id.rpartition("-")[2])].orders.append(order)

    def _compute(self, work: float) -> None:
        num_working = self._num_working()
        asked_s = self._backlog_s + work * STEP_S
        done_s = min(asked_s, num_working * STEP_S)
        busy = done_s / (num_working * STEP_S) if num_working else 0.0
        self._backlog_s = asked_s - done_s
        waits = _calls_by_wait(busy, self.wait_s)
        for pod in self._serving():
            is_working = bool(pod.view.resident)
            pod.work = WorkCounters(
                pod.work.uptime_s + STEP_S,
                pod.work.busy_s + STEP_S * busy * is_working,
                tuple(
                    a + b * is_working for a, b in zip(pod.work.calls_by_wait, waits, strict=True)
                ),
            )


def _calls_by_wait(busy: float, at_least_s: float) -> list[int]:
    """Calls of a step by the time that they wait: that of M/D/1, and behind the backlog."""
    mean_s = _CALL_S / (2 * max(0.01, 1 - busy))  # of those that wait at all
    up_to = [
        0.0 if bound_s < at_least_s else 1 - busy * math.exp(-(bound_s - at_least_s) / mean_s)
        for bound_s in WAIT_BOUNDS_S
    ]
    counts = [round(_CALLS_PER_STEP * share) for share in (*up_to, 1.0)]
    return [count - before for count, before in zip(counts, [0, *counts[:-1]], strict=True)]
