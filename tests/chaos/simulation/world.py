"""A mesh in virtual time: gateways, workers, what connects them, and what happens to them.

Everything that happens follows from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from expertmesh.placement import ExpertMap
from gateway.placement.state import ExpertKey, ExpertLoad, Experts, Order, PlacementPolicy, Plan
from tests.chaos.simulation.dispatch import SimulatedAttention
from tests.chaos.simulation.expert_worker import Observers, Rows, SimulatedWorker
from tests.chaos.simulation.gateway import SILENCE_S, TICK_S, SimulatedGateway
from tests.chaos.simulation.virtual_time import Network, VirtualTime

_HEARTBEAT_S = 0.5
_CLOSED_S = 0.003
_CONNECT_S = 0.2
_STEP_S = 0.2
_POLL_S = 0.25
_KNOWN_S = SILENCE_S + 1.0
"""By then every gateway knows of a fault."""


@dataclass(frozen=True)
class Shape:
    """How large a mesh is."""

    experts: Experts
    policy: PlacementPolicy
    num_workers: int
    num_nodes: int
    slots: tuple[int, int]
    """Fewest and most of a worker."""
    delay_s: float
    """Of a message at most."""
    load_s: float
    fail_share: float
    """Of loads that fail."""

    @staticmethod
    def of(random: Random) -> Shape:
        """Any shape, small enough to be simulated quickly; slots suffice for one copy at least."""
        experts = Experts(
            tuple(range(random.randint(1, 3))), random.randint(2, 12), expert_nbytes=1 << 20
        )
        num_workers = random.randint(1, 5)
        fewest = -(-experts.num_pairs // num_workers) + len(experts.moe_layers)
        most = max(fewest, random.choice([fewest, fewest + 3, experts.num_pairs]))
        policy = PlacementPolicy(
            min_copies=random.randint(1, 3),
            prior_pairs=1.0,
            bytes_per_minute=random.choice([600 << 20, 60 << 30]),
            loads_at_a_time=random.choice([1, 4, 32]),
            balance_every_s=5.0,
            lost_copy_patience_s=random.choice([0.0, 3.0]),
        )
        return Shape(
            experts,
            policy,
            num_workers,
            random.randint(1, num_workers),
            (fewest, most),
            delay_s=random.choice([0.01, 0.01, 0.3]),
            load_s=random.choice([0.005, 0.05]),
            fail_share=random.choice([0.0, 0.0, 0.05]),
        )


@dataclass
class _Lock:
    """What the election is about."""

    holder: SimulatedGateway | None = None
    token: int = 0


@dataclass(frozen=True)
class _Death:
    at_s: float
    held: frozenset[ExpertKey]


@dataclass
class Records:
    """What has happened so far."""

    violations: list[str] = field(default_factory=list)
    deaths: list[_Death] = field(default_factory=list)
    stale_until_s: dict[str, float] = field(default_factory=dict)
    """Gateway to when its map may be old no more."""
    last_order_s: float = 0.0
    num_orders: int = 0


class World:
    """All processes of a mesh.

    Args:
        random: Of everything.
        shape: How large it is.
    """

    def __init__(self, random: Random, shape: Shape) -> None:
        self.random = random
        self.shape = shape
        self.clock = VirtualTime()
        self.network = Network(self.clock, random, shape.delay_s)
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: list[SimulatedGateway] = []
        self.attentions: dict[str, SimulatedAttention] = {}
        self.records = Records()
        self.fail_share = shape.fail_share
        self.popularity: ExpertLoad = shape.experts.no_load() + 1000.0
        self._lock = _Lock()
        self._checked: dict[str, tuple[ExpertMap, int]] = {}
        self._num_started = 0
        for _ in range(2):
            self.start_gateway()
        for _ in range(shape.num_workers):
            self.start_worker()
        self.clock.every(_HEARTBEAT_S, self._heartbeats)
        self.clock.every(_POLL_S, self._elect)
        self.clock.every(_STEP_S, self._steps)
        self.clock.every(TICK_S, self._ticks)

    @property
    def leader(self) -> SimulatedGateway | None:
        """Who holds the lock."""
        return self._lock.holder

    def fail(self, what: str) -> None:
        """Something happened that must not."""
        self.records.violations.append(f"{self.clock.now_s:.3f} s: {what}")

    def start_worker(self, worker_id: str | None = None) -> None:
        """A new process, empty; under the name of an earlier one if it is given."""
        self._num_started += 1
        name = worker_id or f"w{self._num_started}"
        worker = SimulatedWorker(
            self.clock,
            name,
            self._num_started,
            f"node{self._num_started % self.shape.num_nodes}",
            self.random.randint(*self.shape.slots),
            load_s=self.shape.load_s,
            cannot_load=lambda: self.random.random() < self.fail_share,
            observers=Observers(self._tell_gateways, self._check_retire, self._lose),
        )
        self.workers[name] = worker

    def kill_worker(self, worker: SimulatedWorker) -> None:
        """kill -9."""
        if worker.alive:
            worker.die()
            self._lose(worker)

    def start_gateway(self) -> None:
        """A new process; it connects to all workers."""
        self._num_started += 1
        name = f"g{self._num_started}"
        attention = SimulatedAttention(
            name,
            self.clock,
            self.network,
            self.random,
            worker_at=self._alive_worker,
            popularity=lambda: self.popularity,
            on_call=lambda worker, rows, sent_s: self._check_call(name, worker, rows, sent_s),
            fail=self.fail,
        )
        self.attentions[name] = attention
        self.gateways.append(
            SimulatedGateway(
                name,
                self.clock,
                self.network,
                self.shape.experts,
                self.shape.policy,
                load=lambda: self.popularity,
                on_map=lambda new: self._give_map(attention, new),
                on_orders=self._count_orders,
            )
        )

    def kill_gateway(self, gateway: SimulatedGateway) -> None:
        """kill -9; the kernel frees its lock."""
        gateway.alive = False
        self.attentions.pop(gateway.name).alive = False
        self.gateways.remove(gateway)
        if self._lock.holder is gateway:
            self._lock.holder = None

    def depose(self, gateway: SimulatedGateway, unaware_s: float) -> None:
        """Its lock is given up, which it notices later."""
        if self._lock.holder is gateway:
            self._lock.holder = None
            token = gateway.token

            def notice() -> None:
                if gateway.alive and gateway.token == token and self._lock.holder is not gateway:
                    gateway.lead(None)

            self.clock.after(unaware_s, notice)

    def stall_gateway(self, gateway: SimulatedGateway, duration_s: float) -> None:
        """SIGSTOP, then SIGCONT; its attention worker goes on."""
        gateway.stalled = True
        self._be_stale(gateway.name, duration_s)

        def go_on() -> None:
            gateway.stalled = False

        self.clock.after(duration_s, go_on)

    def cut(self, gateway: SimulatedGateway, worker: SimulatedWorker, duration_s: float) -> None:
        """No messages between the two for some time."""
        self.network.cut(gateway.name, worker.worker_id, duration_s)
        self._be_stale(gateway.name, duration_s)

    def run(self, until_s: float) -> None:
        """Goes on until then, or until something happened that must not."""
        while self.clock.now_s < until_s and not self.records.violations:
            self.clock.run(min(until_s, self.clock.now_s + 1.0))

    def _alive_worker(self, worker_id: str) -> SimulatedWorker | None:
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.alive else None

    def _heartbeats(self) -> None:
        for worker in list(self.workers.values()):
            worker.do(partial(self._tell_gateways, worker))
            for gateway in self.gateways:
                if worker.alive and not gateway.stalled and not gateway.hears(worker):
                    delay_s = self.random.uniform(0.0, _CONNECT_S)
                    self.clock.after(delay_s, partial(self._connect, gateway, worker))

    def _connect(self, gateway: SimulatedGateway, worker: SimulatedWorker) -> None:
        if gateway.alive and worker.alive and not gateway.hears(worker):
            gateway.connect(worker)

    def _tell_gateways(self, worker: SimulatedWorker) -> None:
        used = len(worker.resident | worker.retiring)
        if used > worker.num_slots:
            self.fail(f"{worker.worker_id} holds {used} experts in {worker.num_slots} slots")
        for gateway in self.gateways:
            gateway.report_of(worker)

    def _lose(self, worker: SimulatedWorker) -> None:
        """A process is gone; connections to it are closed."""
        self.records.deaths.append(_Death(self.clock.now_s, frozenset(worker.resident)))
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]

        def close() -> None:
            for gateway in self.gateways:
                gateway.lose(worker)
            for attention in list(self.attentions.values()):
                attention.lose(worker)

        self.clock.after(_CLOSED_S, close)

    def _elect(self) -> None:
        if self._lock.holder is None:
            candidates = [g for g in self.gateways if not g.stalled and g.leader is None]
            if candidates:
                self._lock.token += 1
                self._lock.holder = self.random.choice(candidates)
                self._lock.holder.lead(self._lock.token)

    def _steps(self) -> None:
        for attention in list(self.attentions.values()):
            attention.begin_step()

    def _ticks(self) -> None:
        for gateway in list(self.gateways):
            gateway.tick()
            plan = None if gateway.leader is None else gateway.leader.plan
            if not gateway.stalled and self._checked.get(gateway.name) != (gateway.map, id(plan)):
                self._checked[gateway.name] = gateway.map, id(plan)
                self._check_map(gateway)
                if plan is not None:
                    self._check_plan(gateway, plan)

    def _give_map(self, attention: SimulatedAttention, new: ExpertMap) -> None:
        self.clock.after(self.random.uniform(0.0, 0.01), lambda: attention.take_map(new))

    def _count_orders(self, orders: list[Order]) -> None:
        if any(order.experts for order in orders):
            self.records.last_order_s = self.clock.now_s
            self.records.num_orders += len(orders)

    def _be_stale(self, name: str, duration_s: float) -> None:
        end_s = self.clock.now_s + duration_s + 3.0
        stale = self.records.stale_until_s
        stale[name] = max(end_s, stale.get(name, 0.0))

    def _check_call(self, name: str, worker: SimulatedWorker, rows: Rows, sent_s: float) -> None:
        """Nobody is asked for an expert that it does not hold, by whoever can know."""
        held = worker.resident | worker.retiring
        wrong = [expert for expert in rows.row_ids if (rows.layer, expert) not in held]
        is_stale = sent_s < max(self.records.stale_until_s.get(name, 0.0), worker.awake_since_s)
        if wrong and not is_stale:
            self.fail(f"{name} asks {worker.worker_id} for {wrong} of layer {rows.layer}")

    def _check_retire(self, worker: SimulatedWorker, key: ExpertKey, given_s: float) -> None:
        """No order takes the last copy, as far as could be known when it was given."""
        known_s = given_s - _KNOWN_S
        others = [
            other
            for other in self.workers.values()
            if key in other.resident and other.leaving_since_s > known_s and other is not worker
        ]
        excused = any(key in death.held and death.at_s > known_s for death in self.records.deaths)
        if not others and not excused:
            self.fail(f"{worker.worker_id} gives up the last copy of {key}")

    def _check_map(self, gateway: SimulatedGateway) -> None:
        """What a gateway does not cover it reports."""
        uncovered, held = _uncovered(gateway.map), _held(gateway.map)
        if held | uncovered != self.shape.experts.keys() or held & uncovered:
            self.fail(f"{gateway.name}: {sorted(uncovered)} are reported, {sorted(held)} are held")

    def _check_plan(self, gateway: SimulatedGateway, plan: Plan) -> None:
        """A leader reports what is uncovered, and has a place for all that fits."""
        uncovered = _uncovered(gateway.map)
        if set(plan.uncovered) != uncovered:
            self.fail(f"{gateway.name}: the plan has {plan.uncovered}, the map {uncovered}")
        planned = {key for keys in plan.target.values() for key in keys}
        unplaced = set(plan.unplaced)
        if planned | unplaced != self.shape.experts.keys() or planned & unplaced:
            self.fail(f"{gateway.name}: {plan.unplaced} have no place, but {planned} have one")
        slots = [view.num_slots for view in gateway.views if not view.leaving]
        # Slots are shared out evenly, so that less than one a layer and worker is left over.
        spare = len(self.shape.experts.moe_layers) * (len(slots) + 1)
        fits = sum(slots) >= self.shape.experts.num_pairs + spare
        may_fail = self.fail_share or self._lock.holder is not gateway
        if unplaced and fits and not may_fail:
            self.fail(f"{gateway.name}: {plan.unplaced} have no place in {slots} slots")


def _uncovered(expert_map: ExpertMap) -> set[ExpertKey]:
    return {(layer, e) for layer, experts in expert_map.uncovered().items() for e in experts}


def _held(expert_map: ExpertMap) -> set[ExpertKey]:
    return {
        (layer, expert)
        for worker in expert_map.workers
        for layer, experts in worker.resident.items()
        for expert in experts
    }


def skewed(experts: Experts, random: Random) -> ExpertLoad:
    """Some load, from even to all on a few experts."""
    exponent = random.choice([0.0, 0.5, 1.0, 2.0])
    ranks = np.arange(1, experts.num_experts + 1) ** -exponent
    rows = [random.sample(ranks.tolist(), experts.num_experts) for _ in experts.moe_layers]
    return 1000.0 * np.array(rows)
