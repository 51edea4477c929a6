"""The thread that leads: whom it asks what, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.controller import PlacementController
from gateway.placement.election import OnChange
from gateway.placement.expert_load import WorkerLife
from gateway.placement.operator import PlacementRefusedError, UnknownWorkerError
from gateway.placement.order_calls import OnEnd, OrderEnd
from gateway.placement.state import Order, PlacementPolicy, Rescale, WorkerView
from tests.support.placements import obeyed, some_experts, some_workers

EXPERTS = some_experts()
POLICY = PlacementPolicy(lost_copy_patience_s=0.0)
WAIT_S = 10.0


class Mesh:
    """Expert workers, an election and a transport, all in the hands of the test."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        self.workers = list(workers)
        self.all_heard = True
        self.given: list[tuple[Order, str, int]] = []
        self.drained: list[tuple[str, int]] = []
        self.obeys = True
        self.failures: list[Exception] = []
        """What giving an order raises, one after the other."""
        self.num_stops = 0
        self.on_news: Callable[[], None] = lambda: None
        self.lead: OnChange = lambda token: None
        self.on_end: OnEnd = lambda end: None

    # --- Workers

    def known_workers(self) -> tuple[KnownWorker, ...]:
        """At addresses like their names."""
        return tuple(KnownWorker(f"at-{v.worker_id}", v, {}) for v in self.workers)

    def subscribe_news(self, on_news: Callable[[], None]) -> None:
        """Remembers it."""
        self.on_news = on_news

    # --- Election

    def start(self, on_change: OnChange) -> None:
        """Nobody leads yet."""
        self.lead = on_change

    # --- Orders

    def give(self, order: Order, address: str, token: int) -> None:
        """Obeys at once, if it does."""
        if self.failures:
            raise self.failures.pop()
        self.given.append((order, address, token))
        if self.obeys:
            self.workers = obeyed(self.workers, [order])
            self.on_end(OrderEnd(order))

    def drain(self, address: str, incarnation: int) -> None:
        """Remembers it."""
        self.drained.append((address, incarnation))

    def keep(self, lives: Collection[WorkerLife]) -> None:
        """Nothing is open."""

    def stop(self) -> None:
        """Of the election and of the orders; nothing runs."""
        self.num_stops += 1


@contextmanager
def running(mesh: Mesh) -> Iterator[PlacementController]:
    """A controller in this mesh."""

    def make_orders(on_end: OnEnd) -> Mesh:
        mesh.on_end = on_end
        return mesh

    controller = PlacementController(mesh, EXPERTS, POLICY, mesh, make_orders)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()
    assert "placement" not in [thread.name for thread in threading.enumerate()]


def until(condition: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s
        pause.wait(0.005)


def is_filled(mesh: Mesh) -> bool:
    """Every expert has two copies."""
    return sum(len(view.resident) for view in mesh.workers) == 2 * EXPERTS.num_pairs


def test_only_a_leader_gives_orders() -> None:
    """With its token, to the address of each; and none after it was replaced."""
    mesh = Mesh(some_workers(3, 16))
    with running(mesh) as controller:
        mesh.on_news()
        until(lambda: len(controller.report().workers) == 3)
        assert mesh.given == []
        mesh.lead(5)
        until(lambda: is_filled(mesh))
        assert {(order.worker_id, address, token) for order, address, token in mesh.given} == {
            (name, f"at-{name}", 5) for name in ("w0", "w1", "w2")
        }
        until(lambda: controller.report().token == 5 and controller.report().moves == ())
        mesh.lead(None)
        until(lambda: controller.report().token is None)
        num_given = len(mesh.given)
        mesh.workers = [replace(mesh.workers[0], resident=frozenset()), *mesh.workers[1:]]
        mesh.on_news()
        until(lambda: not controller.report().workers[0].resident)
        assert len(mesh.given) == num_given
        mesh.lead(6)
        until(lambda: is_filled(mesh))
        assert mesh.given[-1][2] == 6


def test_the_first_does_not_get_all() -> None:
    """While nothing is resident, those that were discovered and are silent are waited for."""
    workers = some_workers(2, 16)
    mesh = Mesh(workers[:1])
    mesh.all_heard = False
    with running(mesh):
        mesh.lead(1)
        threading.Event().wait(0.3)
        assert mesh.given == []
        mesh.workers, mesh.all_heard = workers, True
        mesh.on_news()
        until(lambda: is_filled(mesh))


def test_all_lost_and_back() -> None:
    """Once somebody has served, nobody is waited for: a first one that comes back gets all."""
    mesh = Mesh(some_workers(2, 16))
    with running(mesh):
        mesh.lead(1)
        until(lambda: is_filled(mesh))
        lost, mesh.workers = mesh.workers, []
        mesh.all_heard = False
        mesh.on_news()
        threading.Event().wait(0.1)
        back = replace(lost[0], incarnation=9, resident=frozenset())
        mesh.workers = [back]
        mesh.on_news()
        until(lambda: len(mesh.workers[0].resident) == EXPERTS.num_pairs)


def test_a_lost_order_of_an_earlier_term_is_no_matter() -> None:
    """Its end comes when another token is led with."""
    mesh = Mesh(some_workers(2, 16))
    mesh.obeys = False
    with running(mesh) as controller:
        mesh.lead(1)
        until(lambda: bool(mesh.given))
        old = [order for order, _, _ in mesh.given]
        mesh.obeys = True
        mesh.lead(2)
        until(lambda: is_filled(mesh))
        for order in old:
            mesh.on_end(OrderEnd(order, is_lost=True))
        until(lambda: controller.report().moves == () and not controller.report().pending)


def test_what_an_operator_may_ask() -> None:
    """A drain of whom the others can replace; a look at the load of a leader alone."""
    mesh = Mesh(some_workers(2, 16))
    with running(mesh) as controller:
        mesh.on_news()
        with pytest.raises(PlacementRefusedError, match="another gateway leads"):
            controller.rebalance()
        with pytest.raises(UnknownWorkerError, match="no expert worker w7; there are w0, w1"):
            controller.drain("w7")
        controller.drain("w1")
        assert mesh.drained == [("at-w1", 101)]
        mesh.workers = some_workers(2, 8)
        with pytest.raises(PlacementRefusedError, match="8 experts would fit on no other"):
            controller.drain("w1")
        mesh.lead(1)
        until(lambda: controller.report().token == 1)
        controller.rebalance()


def test_who_is_to_go_hands_over_first() -> None:
    """It is given nothing and keeps nothing, until it is said that it stays after all."""
    mesh = Mesh(some_workers(3, 16))
    with running(mesh) as controller:
        mesh.lead(1)
        until(lambda: is_filled(mesh))
        controller.rescale(Rescale(frozenset({"w2"}), is_under_way=True))
        until(lambda: not mesh.workers[2].resident)
        assert is_filled(mesh)
        controller.rescale(Rescale())
        until(lambda: bool(mesh.workers[2].resident) and is_filled(mesh))


def test_a_failure_of_the_process_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Without a thread for an order, the next turn begins with what is resident."""
    mesh = Mesh(some_workers(2, 16))
    mesh.failures = [RuntimeError("can't start new thread"), OSError("too many open files")]
    with running(mesh) as controller:
        mesh.lead(1)
        until(lambda: is_filled(mesh))
        until(lambda: controller.report().moves == () and not controller.report().pending)
    assert "can't start new thread" in caplog.text
    assert "too many open files" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_lets_others_lead() -> None:
    """The thread ends, and the election with it; nobody holds a lead that does nothing."""
    mesh = Mesh(some_workers(2, 16))
    mesh.failures = [KeyError("w7")]
    with running(mesh):
        mesh.lead(1)
        until(lambda: mesh.num_stops == 1)
        until(lambda: "placement" not in [thread.name for thread in threading.enumerate()])
