"""The leader changes while experts are moved: two gateways, their own elections and placements."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.controller import PlacementController
from gateway.placement.expert_load import WorkerLife
from gateway.placement.order_calls import OnEnd, OrderEnd
from gateway.placement.state import Order, PlacementPolicy
from tests.support.endpoint_slices import until
from tests.support.kube.api_server import FakeApiServer
from tests.support.lease_mesh import Candidate
from tests.support.placements import copies_of, obeyed, some_experts, some_workers

EXPERTS = some_experts()
POLICY = PlacementPolicy(lost_copy_patience_s=0.0)


class Pool:
    """Expert workers that both gateways see; they refuse tokens below the highest they saw."""

    def __init__(self) -> None:
        self.workers = some_workers(3, 16)
        self.highest = 0
        self.refused: list[Order] = []
        self._lock = threading.Lock()

    def order(self, order: Order, token: int) -> OrderEnd:
        """Carries it out, or refuses."""
        with self._lock:
            if token < self.highest:
                self.refused.append(order)
                return OrderEnd(order, failed=order.experts, message="an earlier leader")
            self.highest = token
            self.workers = obeyed(self.workers, [order])
            return OrderEnd(order)

    def is_filled(self) -> bool:
        """Every expert has two copies."""
        copies = copies_of(self.workers)
        return len(copies) == EXPERTS.num_pairs and all(len(on) == 2 for on in copies.values())


class View:
    """What one gateway has of the pool: news, and a way for orders that may be slow.

    Attributes:
        slow_after: Orders beyond so many arrive only when `deliver` is called.
        given: All orders with their tokens.
    """

    def __init__(self, pool: Pool, slow_after: int | None = None) -> None:
        self.pool = pool
        self.slow_after = slow_after
        self.given: list[tuple[Order, int]] = []
        self.all_heard = True
        self._on_end: OnEnd = lambda end: None

    def known_workers(self) -> tuple[KnownWorker, ...]:
        """All of them."""
        return tuple(KnownWorker(f"at-{v.worker_id}", v, {}) for v in self.pool.workers)

    def subscribe_news(self, on_news: Callable[[], None]) -> None:
        """The placement looks by itself now and then, too."""

    def orders(self, on_end: OnEnd) -> View:
        """For the placement."""
        self._on_end = on_end
        return self

    def give(self, order: Order, address: str, token: int) -> None:
        """Sends it."""
        self.given.append((order, token))
        if self.slow_after is None or len(self.given) <= self.slow_after:
            self._on_end(self.pool.order(order, token))

    def deliver(self) -> None:
        """What was on its way arrives."""
        for order, token in self.given[self.slow_after :]:
            self._on_end(self.pool.order(order, token))

    def drain(self, address: str, incarnation: int) -> None:
        """Nobody drains."""

    def keep(self, lives: Collection[WorkerLife]) -> None:
        """All live on."""

    def stop(self) -> None:
        """Nothing runs."""


@asynccontextmanager
async def gateway(view: View, candidate: Candidate) -> AsyncIterator[PlacementController]:
    """One that takes part; it is stopped at the end."""
    made = PlacementController(view, EXPERTS, POLICY, candidate.election, view.orders)
    made.start()
    try:
        yield made
    finally:
        await until_stopped(made)


async def until_stopped(controller: PlacementController) -> None:
    """Stops it in a thread: the API server needs this one."""
    thread = threading.Thread(target=controller.stop)
    thread.start()
    await until(lambda: not thread.is_alive())


async def test_mid_move(server: FakeApiServer, tmp_path: Path) -> None:
    """The next leader finishes from what is resident; orders of the one before that arrive late are
    refused, and change nothing."""
    pool = Pool()
    slow, quick = View(pool, slow_after=1), View(pool)
    first = await Candidate.create("a", server, tmp_path)
    second = await Candidate.create("b", server, tmp_path)
    async with gateway(slow, first) as old:
        await until(lambda: len(slow.given) > 2)
        async with gateway(quick, second) as new:
            assert not pool.is_filled()
            assert quick.given == []
            first.api.is_cut = True
            await until(lambda: old.report().token is None)
            num_given = len(slow.given)
            await until(pool.is_filled)
            before = pool.workers
            slow.deliver()
            assert pool.refused == [order for order, _ in slow.given[1:]]
            assert pool.workers == before
            await until(lambda: new.report().moves == () and not new.report().pending)
            assert len(slow.given) == num_given
            tokens = {token for _, token in slow.given}, {token for _, token in quick.given}
            assert max(tokens[0]) < min(tokens[1])
            assert pool.is_filled()
