"""A simulated gateway: it watches workers, makes expert maps, takes part in the election, leads.

What it decides is decided by the real functions; only watching and sending are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from gateway.placement.leader import Leader
from gateway.placement.state import (
    ExpertKey,
    ExpertLoad,
    Experts,
    Order,
    PlacementPolicy,
    WorkerView,
)
from tests.chaos.simulation.expert_worker import SimulatedWorker
from tests.chaos.simulation.virtual_time import Network, VirtualTime

SILENCE_S = 2.5
"""A worker that says nothing for so long is lost."""
TICK_S = 0.1


@dataclass
class _Connection:
    """Of one gateway to one incarnation."""

    number: int
    worker: SimulatedWorker
    heard_s: float
    view: WorkerView | None = None


@dataclass(frozen=True)
class _Sent:
    """An order on its way."""

    order: Order
    connection: int


class SimulatedGateway:
    """One process of a gateway with its attention worker.

    Args:
        name: Different for each process.
        clock: The time.
        network: To the workers.
        experts: What there is to place.
        policy: Of placement.
        load: Of each expert, when asked.
        on_map: Called with each new map.
        on_orders: Called with the orders that are given.
    """

    def __init__(
        self,
        name: str,
        clock: VirtualTime,
        network: Network,
        experts: Experts,
        policy: PlacementPolicy,
        *,
        load: Callable[[], ExpertLoad],
        on_map: Callable[[ExpertMap], None],
        on_orders: Callable[[list[Order]], None],
    ) -> None:
        self.name = name
        self.alive = True
        self.stalled = False
        self.leader: Leader | None = None
        self.token = 0
        self.map = ExpertMap(0, experts.moe_layers, experts.num_experts)
        self._clock = clock
        self._network = network
        self._experts = experts
        self._policy = policy
        self._load = load
        self._on_map = on_map
        self._on_orders = on_orders
        self._connections: dict[str, _Connection] = {}
        self._folded: list[WorkerView] = []
        self._num_connections = 0
        self._sent: dict[int, _Sent] = {}
        self._num_sent = 0

    @property
    def views(self) -> list[WorkerView]:
        """Workers that it hears of."""
        connections = self._connections.values()
        return [connection.view for connection in connections if connection.view is not None]

    def lead(self, token: int | None) -> None:
        """It was elected, or is told that it leads no more."""
        self.leader = None if token is None else Leader(self._experts, self._policy, token)
        self.token = token or 0
        self._sent.clear()

    def hears(self, worker: SimulatedWorker) -> bool:
        """True if it has a connection to this incarnation."""
        connection = self._connections.get(worker.worker_id)
        return connection is not None and connection.worker is worker

    def connect(self, worker: SimulatedWorker) -> None:
        """Opens a Watch stream."""
        self._num_connections += 1
        connection = _Connection(self._num_connections, worker, self._clock.now_s)
        self._connections[worker.worker_id] = connection
        self._network.send(
            self.name,
            worker.worker_id,
            lambda: worker.do(lambda: self.report_of(worker)),
            connection.number,
        )

    def report_of(self, worker: SimulatedWorker) -> None:
        """The worker sends what it says of itself, if this gateway is connected to it."""
        if not self.hears(worker):
            return
        number, view = self._connections[worker.worker_id].number, worker.view()
        self._network.send(worker.worker_id, self.name, lambda: self._see(number, view), number)

    def lose(self, worker: SimulatedWorker) -> None:
        """The connection to an incarnation is gone."""
        if not self.hears(worker):
            return
        connection = self._connections.pop(worker.worker_id)
        lost = [n for n, sent in self._sent.items() if sent.connection == connection.number]
        for number in lost:
            order = self._sent.pop(number).order
            if self.leader is not None:
                self.leader.lost(order, self._clock.now_s)

    def tick(self) -> None:
        """Looks for silent workers, makes a map, and gives orders if it leads."""
        if not self.alive or self.stalled:
            return
        now_s = self._clock.now_s
        for connection in list(self._connections.values()):
            if now_s - connection.heard_s > SILENCE_S:
                self.lose(connection.worker)
        self._fold()
        if self.leader is not None:
            orders = self.leader.advance(self.views, self._load(), now_s)
            self._on_orders(orders)
            for order in orders:
                self._send(order)

    def _see(self, number: int, view: WorkerView) -> None:
        connection = self._connections.get(view.worker_id)
        if not self.alive or connection is None or connection.number != number:
            return
        if self.stalled:  # read when it goes on
            self._clock.after(TICK_S, lambda: self._see(number, view))
            return
        connection.heard_s = self._clock.now_s
        connection.view = view

    def _fold(self) -> None:
        views = self.views
        if views == self._folded:
            return
        self._folded = views
        new = self.map.replaced(_entry(view) for view in views)
        if new.workers != self.map.workers:
            self.map = new
            self._on_map(new)

    def _send(self, order: Order) -> None:
        connection = self._connections[order.worker_id]
        worker, token, given_s = connection.worker, self.token, self._clock.now_s
        self._num_sent += 1
        number = self._num_sent
        self._sent[number] = _Sent(order, connection.number)

        def reply(failed: frozenset[ExpertKey], refused: bool) -> None:
            self._network.send(
                order.worker_id,
                self.name,
                lambda: self._ended(number, failed, refused),
                connection.number,
            )

        def arrive() -> None:
            worker.do(lambda: worker.obey(order, token, given_s, reply))

        self._network.send(self.name, order.worker_id, arrive, connection.number)

    def _ended(self, number: int, failed: frozenset[ExpertKey], refused: bool) -> None:
        if self.stalled:  # read when it goes on
            self._clock.after(TICK_S, lambda: self._ended(number, failed, refused))
            return
        sent = self._sent.pop(number, None)
        if sent is None or self.leader is None or not self.alive:
            return
        self.leader.ended(sent.order, sent.order.experts if refused else failed, self._clock.now_s)


def _entry(view: WorkerView) -> ExpertWorkerEntry:
    resident: dict[int, tuple[int, ...]] = {}
    for layer, expert in sorted(view.resident):
        resident[layer] = (*resident.get(layer, ()), expert)
    return ExpertWorkerEntry(
        view.worker_id, view.worker_id, view.incarnation, resident, leaving=view.leaving
    )
