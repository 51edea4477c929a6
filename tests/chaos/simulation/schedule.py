"""One seeded schedule: faults at random times, then quiet, then a look at what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from random import Random

from gateway.placement.state import Plan
from tests.chaos.simulation.expert_worker import SimulatedWorker
from tests.chaos.simulation.gateway import SimulatedGateway
from tests.chaos.simulation.world import Shape, World, skewed

_START_S = 2.0
_TROUBLE_S = 30.0
_QUIET_S = 100.0
"""Longer than an order may be doubted, than a failed load is waited for, and than patience."""
_STABLE_S = 10.0
"""At the end of the quiet time nothing is ordered any more for so long."""


_FAULTS = (
    *("kill", "kill", "restart", "kill all", "join", "drain", "hang", "cut", "skew"),
    *("kill gateway", "kill leader", "depose", "stall", "lose the leader in a move"),
)


@dataclass
class Outcome:
    """What came of a schedule."""

    seed: int
    faults: Counter[str]
    violations: list[str]
    num_steps: int
    num_retries: int
    num_pauses: int
    num_orders: int
    converged_s: float
    """Seconds from the last fault to the last order."""


def run_schedule(seed: int) -> Outcome:
    """Runs it; the same seed gives the same outcome."""
    random = Random(seed)
    world = World(random, Shape.of(random))
    faults: Counter[str] = Counter()
    end_s = _START_S + _TROUBLE_S

    def trouble() -> None:
        faults[_one_fault(world)] += 1
        next_s = random.expovariate(random.choice([0.3, 1.0]))
        if world.clock.now_s + next_s < end_s:
            world.clock.after(next_s, trouble)

    world.clock.after(_START_S, trouble)
    world.run(end_s)
    _make_good(world)
    world.run(end_s + _QUIET_S)
    _check_end(world)
    counts = [attention.counts for attention in world.attentions.values()]
    return Outcome(
        seed,
        faults,
        world.records.violations,
        sum(count.steps for count in counts),
        sum(count.retries for count in counts),
        sum(count.pauses for count in counts),
        world.records.num_orders,
        max(0.0, world.records.last_order_s - end_s),
    )


def _one_fault(world: World) -> str:
    """Something happens; its name."""
    random = world.random
    worker = random.choice([*world.workers.values()]) if world.workers else None
    gateway = random.choice(world.gateways) if world.gateways else None
    name = random.choice(_FAULTS)
    if name == "join" or worker is None:
        world.start_worker()
        return "join"
    if name == "kill":
        world.kill_worker(worker)
    elif name == "restart":
        world.kill_worker(worker)
        delay_s = random.uniform(0.2, 5.0)
        world.clock.after(delay_s, partial(_restart, world, worker.worker_id))
    elif name == "drain":
        worker.do(lambda: worker.leave(random.uniform(5.0, 20.0)))
    elif name == "hang":
        worker.hang()
        world.clock.after(random.uniform(0.1, 8.0), worker.go_on)
    elif name == "skew":
        world.popularity = skewed(world.shape.experts, random)
    elif name == "kill all":
        for each in list(world.workers.values()):
            world.kill_worker(each)
            delay_s = random.uniform(0.2, 5.0)
            world.clock.after(delay_s, partial(_restart, world, each.worker_id))
    elif name == "lose the leader in a move":
        world.popularity = skewed(world.shape.experts, random)
        world.start_worker()
        world.clock.after(random.uniform(0.0, 3.0), partial(_lose_leader, world))
    elif gateway is not None:
        _gateway_fault(world, name, gateway, worker)
    return name


def _gateway_fault(
    world: World, name: str, gateway: SimulatedGateway, worker: SimulatedWorker | None
) -> None:
    random = world.random
    leader = world.leader or gateway
    if name == "cut" and worker is not None:
        world.cut(gateway, worker, random.uniform(0.1, 6.0))
    elif name == "stall":
        world.stall_gateway(gateway, random.uniform(0.1, 4.0))
    elif name == "depose":
        world.depose(leader, random.uniform(0.0, 3.0))
    elif name in ("kill leader", "kill gateway"):
        world.kill_gateway(leader if name == "kill leader" else gateway)
        world.clock.after(random.uniform(0.1, 3.0), world.start_gateway)


def _lose_leader(world: World) -> None:
    leader = world.leader
    if leader is not None:
        worker = world.random.choice([*world.workers.values()]) if world.workers else None
        _gateway_fault(world, world.random.choice(["depose", "kill leader", "cut"]), leader, worker)


def _restart(world: World, worker_id: str) -> None:
    if worker_id not in world.workers:
        world.start_worker(worker_id)


def _make_good(world: World) -> None:
    """The trouble is over: nothing fails any more, and there are workers enough."""
    world.fail_share = 0.0
    experts = world.shape.experts
    while _num_slots(world) < experts.num_pairs + len(experts.moe_layers) * len(world.workers):
        world.start_worker()


def _num_slots(world: World) -> int:
    staying = [worker for worker in world.workers.values() if not worker.leaving]
    return sum(min(worker.num_slots, world.shape.experts.num_pairs) for worker in staying)


def _check_end(world: World) -> None:
    """All is as planned and stays so, every copy that fits is there, and steps go on."""
    if world.records.violations:
        return
    holder = world.leader
    plan = None if holder is None or holder.leader is None else holder.leader.plan
    if holder is None or holder.leader is None or plan is None:
        world.fail("nobody leads")
        return
    if holder.leader.pending:
        world.fail(f"orders do not end: {holder.leader.pending}")
    if world.records.last_order_s > world.clock.now_s - _STABLE_S:
        world.fail(f"orders do not come to an end: {plan.why}")
    for worker in world.workers.values():
        target = plan.target.get(worker.worker_id, frozenset())
        if worker.leaving or worker.resident != target or worker.retiring:
            world.fail(f"{worker.view()} is not as planned: {target}")
    _check_copies(world, plan)
    _check_steps(world)


def _check_copies(world: World, plan: Plan) -> None:
    shape, workers = world.shape, world.workers.values()
    if plan.uncovered or plan.unplaced:
        world.fail(f"{plan.uncovered} have no copy, {plan.unplaced} no place")
    safe = min(shape.policy.min_copies, len(workers))
    even_share = -(-safe * shape.experts.num_pairs // len(workers))
    if min(worker.num_slots for worker in workers) > even_share + len(shape.experts.moe_layers):
        fewest = min(plan.num_copies().values())
        if fewest < safe:
            world.fail(f"{fewest} copies of an expert, expected {safe}")


def _check_steps(world: World) -> None:
    before = {name: attention.counts.steps for name, attention in world.attentions.items()}
    pauses = sum(attention.counts.pauses for attention in world.attentions.values())
    world.run(world.clock.now_s + 5.0)
    for name, attention in world.attentions.items():
        if attention.counts.steps < before[name] + 4:
            world.fail(f"{name} computes no steps")
    if sum(attention.counts.pauses for attention in world.attentions.values()) != pauses:
        world.fail("steps pause although every expert has a copy")
