"""The same bits wherever experts are, whoever else is in the batch, whatever fails meanwhile.

The reference is one process that holds all experts, with one request at a time. Everything else is
drawn at random: how many of four expert workers are used, which experts they hold and how many
copies there are, how many streams share a step, and a fault in the middle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertmesh.model_config import DtypeName
from tests.chaos.harness import orders
from tests.chaos.harness.checks import wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import Mesh, mesh_at
from tests.chaos.harness.orders import Pairs
from tests.chaos.harness.pool import expert_pool, start_all
from tests.chaos.harness.streams import Workload, answers_alone
from tests.chaos.harness.suffering import Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.mesh import gateway
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_WORKERS = 4
NUM_REQUESTS = 50
NUM_CONFIGURATIONS = 10
"""Of each dtype."""
ALL_PAIRS = orders.all_pairs(MIXTRAL)


@dataclass(frozen=True)
class Configuration:
    """One way to serve."""

    placement: tuple[Pairs, ...]
    """What each of the four workers holds."""
    num_streams: int
    fault: str

    @classmethod
    def draw(cls, chance: random.Random) -> Configuration:
        """Any; nothing fails where there is but one copy."""
        used = chance.sample(range(NUM_WORKERS), chance.randint(1, NUM_WORKERS))
        num_copies = chance.randint(1, len(used))
        holders = {pair: chance.sample(used, num_copies) for pair in sorted(ALL_PAIRS)}
        return cls(
            placement=tuple(
                frozenset(pair for pair in ALL_PAIRS if worker in holders[pair])
                for worker in range(NUM_WORKERS)
            ),
            num_streams=chance.choice((1, 4, 16)),
            fault=chance.choice((*FAULTS, "none")) if num_copies > 1 else "none",
        )


def _kill(mesh: Mesh, placement: Sequence[Pairs], victim: int) -> None:
    worker = mesh.workers[victim]
    worker.kill()
    start_all([worker])
    orders.load(worker, placement[victim])


def _hang(mesh: Mesh, placement: Sequence[Pairs], victim: int) -> None:
    mesh.workers[victim].hang(1.0)


def _move(mesh: Mesh, placement: Sequence[Pairs], victim: int) -> None:
    """Everything one worker further, and back."""
    orders.place(mesh, (*placement[1:], *placement[:1]))
    orders.place(mesh, placement)


FAULTS: Mapping[str, Callable[[Mesh, Sequence[Pairs], int], None]] = {
    "kill": _kill,
    "hang": _hang,
    "move": _move,
}


@dataclass(frozen=True)
class Served:
    """A mesh of four workers in one dtype, and what it must answer."""

    mesh: Mesh
    traffic: Traffic


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, tiny_mixtral: Path) -> Iterator[Served]:
    """In FP32, then in bfloat16."""
    dtype: DtypeName = request.param
    workload = Workload(MIXTRAL.vocab_size, num_requests=NUM_REQUESTS, min_tokens=10, max_tokens=60)
    with gateway(tiny_mixtral, ["local"], dtype=dtype) as alone:
        expected = answers_alone(alone.api.port, workload)
    with expert_pool(tiny_mixtral, ["all", *["none"] * 3], ("--dtype", dtype)) as workers:
        addresses = [worker.address for worker in workers]
        with mesh_at(tiny_mixtral, workers, addresses, dtype=dtype) as mesh:
            yield Served(mesh, Traffic(workload, expected))


def test_same_bits(served: Served, table: list[Row]) -> None:
    """50 requests in random configurations, greedy and seeded: tokens and log probabilities."""
    row = Row("random placements, neighbours, faults", times=NUM_CONFIGURATIONS)
    table.append(row)
    chance = random.Random(7)
    for _ in range(NUM_CONFIGURATIONS):
        configuration = Configuration.draw(chance)
        orders.place(served.mesh, configuration.placement)
        num_streams = configuration.num_streams
        ports = [served.mesh.api.port]
        with Load(ports, served.traffic.workload, num_streams, count=NUM_REQUESTS) as load:
            load.wait_tokens(50)
            _fail(served.mesh, configuration, chance)
            streams = load.wait()
        assert len(streams) == NUM_REQUESTS
        judge(streams, served.traffic.expected, row)
    wait_idle(served.mesh.api)


def _fail(mesh: Mesh, configuration: Configuration, chance: random.Random) -> None:
    used = [index for index, pairs in enumerate(configuration.placement) if pairs]
    fault = FAULTS.get(configuration.fault)
    if fault is not None:
        fault(mesh, configuration.placement, chance.choice(used))
