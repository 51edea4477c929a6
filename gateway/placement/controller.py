"""Follows expert workers and, as leader, has experts moved.

What expert workers report is the only truth. So nothing has to be handed over when another gateway
becomes leader: it plans from what is resident, and finishes or undoes what was begun.

Thread: `placement` owns everything here. Others only wake it (news of expert workers, another
leader, the end of an order, a wish of an operator) and read the report, which is replaced whole.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.election import Election
from gateway.placement.expert_load import RecentLoad, life_of
from gateway.placement.leader import Leader
from gateway.placement.operator import PlacementRefusedError, UnknownWorkerError
from gateway.placement.order_calls import OnEnd, OrderEnd, Orders
from gateway.placement.plan import plan
from gateway.placement.report import MoveCounts, PlacementReport
from gateway.placement.state import (
    ExpertLoad,
    Experts,
    PlacementPolicy,
    Plan,
    Rescale,
    WorkerView,
)

logger = logging.getLogger("gateway.placement")

SETTLE_S = 2.0
"""While nothing is resident anywhere, all expert workers that are known are waited for, so long
after the first of them answers."""
_TICK_S = 0.5
_GATHER_S = 0.02
_REST = 4.0
"""Times of a turn between it and the next."""
_JOIN_S = 5.0


class Workers(Protocol):
    """Who knows the expert workers."""

    def known_workers(self) -> tuple[KnownWorker, ...]:
        """Those that answer and fit."""

    @property
    def all_heard(self) -> bool:
        """True if all that were discovered have answered once."""

    def subscribe_news(self, on_news: Callable[[], None]) -> None:
        """Calls `on_news` whenever the above may have changed."""


class PlacementController:
    """Keeps every expert on enough expert workers, and their load even.

    Args:
        workers: Who knows the expert workers.
        experts: What is placed.
        policy: How much is moved, and for what.
        election: Who leads.
        make_orders: Makes what carries orders out; it is given where to tell their end.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        workers: Workers,
        experts: Experts,
        policy: PlacementPolicy,
        election: Election,
        make_orders: Callable[[OnEnd], Orders],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._experts = experts
        self._policy = policy
        self._election = election
        self._clock = clock
        self._orders = make_orders(self._order_ended)
        self._load = RecentLoad(experts)
        self._token: int | None = None
        self._rescale = Rescale()
        self._term: _Term | None = None
        self._ends: queue.SimpleQueue[OrderEnd] = queue.SimpleQueue()  # one for each open order
        self._moved = MoveCounts()
        self._first_known_s: float | None = None
        self._said = ""
        self._wake = threading.Event()
        self._rebalance = threading.Event()
        self._stopping = threading.Event()
        self._report = PlacementReport(experts, policy)
        self._thread = threading.Thread(target=self._run, name="placement", daemon=True)
        workers.subscribe_news(self._wake.set)

    def start(self) -> None:
        """Takes part in the election and follows expert workers."""
        self._thread.start()
        self._election.start(self._lead)

    def stop(self) -> None:
        """Leads no more; orders that are being carried out are left to the expert workers."""
        self._election.stop()
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        self._orders.stop()

    # --- operators, from any thread; see Operator ---

    def report(self) -> PlacementReport:
        """How things are."""
        return self._report

    def rebalance(self) -> None:
        """Plans at once, and for every gain in evenness."""
        if self._token is None:
            raise PlacementRefusedError("another gateway leads the placement: ask that one")
        self._rebalance.set()
        self._wake.set()

    def drain(self, worker_id: str) -> None:
        """Tells an expert worker to hand over what it holds and to end."""
        known = {worker.view.worker_id: worker for worker in self._workers.known_workers()}
        if worker_id not in known:
            raise UnknownWorkerError(worker_id, sorted(known))
        view = known[worker_id].view
        others = [worker.view for worker in known.values() if worker.view is not view]
        load_LE = self._report.load
        without = plan(
            self._experts,
            others,
            self._experts.no_load() if load_LE is None else load_LE,
            self._policy,
        )
        if without.unplaced:
            raise PlacementRefusedError(
                f"{len(without.unplaced)} experts would fit on no other expert worker than "
                f"{worker_id}"
            )
        self._orders.drain(known[worker_id].address, view.incarnation)

    # --- who scales, from any thread; see gateway.scaling ---

    @property
    def token(self) -> int | None:
        """Fencing token of this gateway; None while it does not lead."""
        return self._token

    def rescale(self, change: Rescale) -> None:
        """Has expert workers handed over that are to go, and leaves load alone meanwhile."""
        if change != self._rescale:
            self._rescale = change
            self._wake.set()

    # --- other threads ---

    def _lead(self, token: int | None) -> None:
        self._token = token
        self._wake.set()

    def _order_ended(self, end: OrderEnd) -> None:
        self._ends.put(end)
        self._wake.set()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wake.wait(_TICK_S)
                self._wake.clear()
                began_s = time.monotonic()
                self._try_turn()
                # News that comes meanwhile is for one turn, and a large mesh leaves the core to
                # others most of the time.
                took_s = time.monotonic() - began_s
                self._stopping.wait(max(_GATHER_S, _REST * took_s))
        finally:  # a fault of ours, or the end: let others lead
            self._election.stop()

    def _try_turn(self) -> None:
        try:
            self._turn(self._workers.known_workers(), self._clock())
        except (MemoryError, OSError, RuntimeError):  # of this process: no memory, files, threads
            logger.exception("experts could not be placed")
            self._orders.keep(())
            self._term = None  # what is resident goes on serving, and is the truth to begin from

    def _turn(self, known: Sequence[KnownWorker], now_s: float) -> None:
        self._load.take([(life_of(worker.view), worker.pairs) for worker in known], now_s)
        load_LE = self._load.load_LE()
        self._orders.keep([life_of(worker.view) for worker in known])
        term = self._term = self._present_term()
        self._take_ends(term, now_s)
        if term is not None and self._has_settled(known, now_s):
            self._lead_on(term, known, load_LE, now_s)
        self._report = PlacementReport(
            self._experts,
            self._policy,
            None if term is None else term.token,
            tuple(worker.view for worker in known),
            None if term is None else term.leader.plan,
            () if term is None else tuple(term.leader.pending),
            load_LE,
            self._moved,
        )

    def _present_term(self) -> _Term | None:
        """Of the token of now: a new one begins with nothing but what is resident."""
        token, term = self._token, self._term
        if token is None or (term is not None and term.token == token):
            return None if token is None else term
        return _Term(token, Leader(self._experts, self._policy, token))

    def _take_ends(self, term: _Term | None, now_s: float) -> None:
        while True:
            try:
                end = self._ends.get_nowait()
            except queue.Empty:
                return
            _tell_end(end)
            self._moved = self._moved.with_end(end)
            if term is None or end.order not in term.leader.pending:
                continue  # of an earlier term
            if end.is_lost:
                term.leader.lost(end.order, now_s)
            else:
                term.leader.ended(end.order, end.failed, now_s)

    def _has_settled(self, known: Sequence[KnownWorker], now_s: float) -> bool:
        """False while all are empty, and more of them may turn up in a moment."""
        if self._first_known_s is None:
            if not known:
                return False
            self._first_known_s = now_s
        is_empty = not any(worker.view.resident or worker.view.retiring for worker in known)
        is_early = now_s - self._first_known_s < SETTLE_S and not self._workers.all_heard
        return not (is_empty and is_early)

    def _lead_on(
        self, term: _Term, known: Sequence[KnownWorker], load_LE: ExpertLoad, now_s: float
    ) -> None:
        if self._rebalance.is_set():
            self._rebalance.clear()
            term.leader.rebalance()
        change = self._rescale
        term.leader.minds_load = not change.is_under_way
        views = [_with_change(worker.view, change) for worker in known]
        addresses = {worker.view.worker_id: worker.address for worker in known}
        orders = term.leader.advance(views, load_LE, now_s)
        self._tell(term.leader.plan)
        for order in orders:
            logger.debug("order to %s: %s %s", order.worker_id, order.kind, order.experts)
            self._orders.give(order, addresses[order.worker_id], term.token)

    def _tell(self, made: Plan | None) -> None:
        """That something is to be done, and that all is done; what fits nowhere, as a warning."""
        why = "" if made is None else made.why
        if bool(why) != bool(self._said):
            logger.info("placement: %s", why or "all experts are where they should be")
            if made is not None and made.unplaced:
                logger.warning("%d experts fit on no expert worker", len(made.unplaced))
        self._said = why


@dataclass(frozen=True)
class _Term:
    """From the day that this gateway leads to the day that it does not."""

    token: int
    leader: Leader


def _tell_end(end: OrderEnd) -> None:
    order = end.order
    if end.failed:
        logger.warning(
            "expert worker %s could not %s %d of %d experts: %s",
            *(order.worker_id, order.kind, len(end.failed), len(order.experts), end.message),
        )
    elif end.is_lost:
        logger.info("an order to expert worker %s was lost: %s", order.worker_id, end.message)


def _with_change(view: WorkerView, change: Rescale) -> WorkerView:
    return replace(view, leaving=True) if view.worker_id in change.leaving else view
