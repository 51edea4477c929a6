"""A term of leadership, step by step, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.placement import leader as leader_module
from gateway.placement.leader import Leader
from gateway.placement.plan import plan
from gateway.placement.state import Order, PlacementPolicy, Plan, WorkerView
from tests.support.placements import carried_out, copies_of, obeyed, some_experts, some_workers

EXPERTS = some_experts()
POLICY = PlacementPolicy(lost_copy_patience_s=10.0, balance_every_s=20.0)


def settle(leader: Leader, workers: list[WorkerView], now_s: float) -> list[WorkerView]:
    """Obeys until there are no more orders."""
    for _ in range(50):
        orders = leader.advance(workers, EXPERTS.no_load(), now_s)
        if not orders:
            return workers
        workers = obeyed(workers, orders)
        for order in orders:
            leader.ended(order, (), now_s)
    raise AssertionError("orders do not end")


def test_empty_workers_are_filled_and_then_left_alone() -> None:
    """In the end all is as planned."""
    leader = Leader(EXPERTS, POLICY)
    workers = settle(leader, some_workers(3, 16), 0.0)
    assert min(len(holders) for holders in copies_of(workers).values()) == 2
    assert leader.plan is not None
    assert workers == carried_out(workers, leader.plan.target)
    assert leader.plan.uncovered == ()
    assert leader.advance(workers, EXPERTS.no_load(), 1.5) == []
    assert leader.plan.why == ""


def test_a_plan_is_not_made_anew_with_each_expert_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most once a second, but at once when workers come, go or change; what lacks is told."""
    made: list[float] = []
    now_s = 0.0

    def counted(*args: Any) -> Plan:
        made.append(now_s)
        return plan(*args)

    monkeypatch.setattr(leader_module, "plan", counted)
    leader = Leader(EXPERTS, PlacementPolicy(loads_at_a_time=1))
    workers = some_workers(2, 16)
    for tenths in range(15):
        now_s = tenths / 10
        orders = leader.advance(workers, EXPERTS.no_load(), now_s)
        assert leader.plan is not None
        assert set(leader.plan.uncovered) == EXPERTS.keys() - set(copies_of(workers))
        workers = obeyed(workers, orders)
        for order in orders:
            leader.ended(order, (), now_s)
    assert made == [0.0, 1.0]
    now_s = 1.5
    leader.advance([replace(workers[0], leaving=True), workers[1]], EXPERTS.no_load(), now_s)
    assert made == [0.0, 1.0, 1.5]


def test_what_is_uncovered_is_told_as_it_is() -> None:
    """Also when it is as it was when the plan was made, and was not in between."""
    leader = Leader(EXPERTS, POLICY)
    workers = settle(leader, some_workers(2, 16), 0.0)
    empty = [replace(view, resident=frozenset()) for view in workers]
    for tenths, views in enumerate((workers, empty, workers), start=50):
        leader.advance(views, EXPERTS.no_load(), tenths / 10)
        assert leader.plan is not None
        assert set(leader.plan.uncovered) == EXPERTS.keys() - set(copies_of(views))


def test_a_lost_worker_is_given_time_to_come_back() -> None:
    """Nothing is moved while its copies are elsewhere too; after that they are made anew."""
    leader = Leader(EXPERTS, POLICY)
    workers = settle(leader, some_workers(3, 16), 0.0)
    assert leader.advance(workers[1:], EXPERTS.no_load(), 1.0) == []
    assert leader.advance(workers[1:], EXPERTS.no_load(), 10.9) == []
    back = replace(workers[0], incarnation=7, resident=frozenset())
    announcement, order = leader.advance([back, *workers[1:]], EXPERTS.no_load(), 10.95)
    assert announcement == Order("load", "w0", 7, ())
    assert order == Order("load", "w0", 7, order.experts)
    assert set(order.experts) == workers[0].resident
    leader.ended(announcement, (), 10.96)
    leader.ended(order, (), 10.96)
    leader.advance(workers[1:], EXPERTS.no_load(), 11.0)
    assert leader.advance(workers[1:], EXPERTS.no_load(), 21.1) != []


def test_a_failed_load_is_tried_elsewhere_and_later_again() -> None:
    """The wait doubles each time."""
    leader = Leader(EXPERTS, PlacementPolicy(min_copies=1))
    workers = some_workers(2, 16)
    asked: list[tuple[float, str]] = []
    key = (1, 0)
    for tenths in range(60):
        orders = leader.advance(workers, EXPERTS.no_load(), tenths / 10)
        for order in orders:
            failed = {key} & set(order.experts) if order.kind == "load" else set()
            asked += [(tenths / 10, order.worker_id) for _ in failed]
            leader.ended(order, failed, tenths / 10)
            workers = obeyed(workers, [replace(order, experts=tuple({*order.experts} - failed))])
    first = asked[0][1]
    other = {"w0": "w1", "w1": "w0"}[first]
    assert [worker for _, worker in asked[:4]] == [first, other, first, other]
    times = [at_s for at_s, worker in asked if worker == first]
    assert times[:3] == pytest.approx([0.0, 1.0, 3.0], abs=0.11)
    assert leader.plan is not None
    assert leader.plan.uncovered == (key,)


def test_nothing_is_given_up_for_copies_that_an_earlier_leader_may_unload() -> None:
    """A copy on a worker counts once the worker has heard of this leader."""
    experts = some_experts(1, 6)
    keys = frozenset((1, expert) for expert in range(6))
    workers = [replace(view, resident=keys) for view in some_workers(3, 16)]
    leader = Leader(experts, PlacementPolicy(min_copies=1))
    announcements = leader.advance(workers, experts.no_load(), 0.0)
    assert [(order.kind, order.experts) for order in announcements] == [("load", ())] * 3
    assert leader.advance(workers, experts.no_load(), 0.1) == []
    leader.ended(announcements[0], (), 0.2)
    unloads = leader.advance(workers, experts.no_load(), 0.3)
    assert {order.worker_id for order in unloads} == {"w1", "w2"}
    for order in announcements[1:]:
        leader.ended(order, (), 0.4)
    (last,) = leader.advance(obeyed(workers, unloads), experts.no_load(), 0.5)
    assert (last.kind, last.worker_id) == ("unload", "w0")
    left = copies_of(obeyed(workers, [*unloads, last]))
    assert [len(left[key]) for key in sorted(keys)] == [1] * 6


def test_an_unload_that_was_lost_is_doubted() -> None:
    """What it names does not count as a copy while it may still arrive."""
    leader = Leader(EXPERTS, PlacementPolicy(min_copies=1))
    workers = settle(leader, some_workers(2, 16), 0.0)
    key = min(workers[0].resident)
    both = [workers[0], replace(workers[1], resident=workers[1].resident | {key})]
    (unload,) = leader.advance(both, EXPERTS.no_load(), 1.0)
    assert (unload.kind, unload.worker_id, unload.experts) == ("unload", "w1", (key,))
    leader.lost(unload, 2.0)
    going = [replace(both[0], leaving=True), both[1]]
    orders = leader.advance(going, EXPERTS.no_load(), 3.0)
    assert all(key not in order.experts for order in orders if order.kind == "unload")
    for order in orders:
        leader.ended(order, (), 3.0)
    settled = settle(leader, obeyed(going, orders), 62.1)
    assert settled[0].resident == frozenset()


def test_load_is_looked_at_now_and_then() -> None:
    """A skewed load moves nothing before its time, or before it is asked for."""
    leader = Leader(EXPERTS, PlacementPolicy(min_copies=1, balance_every_s=20.0))
    workers = settle(leader, some_workers(2, 16), 0.0)
    load = EXPERTS.no_load()
    for layer, expert in workers[0].resident:
        load[EXPERTS.moe_layers.index(layer), expert] = 1e6
    assert leader.advance(workers, load, 19.9) == []
    leader.minds_load = False
    assert leader.advance(workers, load, 20.0) == []
    leader.minds_load = True
    assert leader.advance(workers, load, 20.0) != []
    other = Leader(EXPERTS, PlacementPolicy(min_copies=1, balance_every_s=20.0))
    settle(other, workers, 0.0)
    other.rebalance()
    assert other.advance(workers, load, 0.1) != []


def test_orders_that_were_never_given_cannot_end() -> None:
    """That would be a mistake of the caller."""
    with pytest.raises(ValueError, match="not in list"):
        Leader(EXPERTS, POLICY).ended(Order("load", "w0", 1, ()), (), 0.0)


@pytest.mark.parametrize(
    ("name", "value"), [("min_copies", 0), ("gain", -0.1), ("bytes_per_minute", 0)]
)
def test_a_policy_names_what_is_out_of_range(name: str, value: float) -> None:
    """With its value."""
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        replace(PlacementPolicy(), **{name: value})


def test_orders_of_two_terms_differ() -> None:
    """An order that ends late is not taken for the same one of a later term."""
    terms = [Leader(EXPERTS, POLICY, token) for token in (4, 5)]
    first, second = (term.advance(some_workers(2, 16), EXPERTS.no_load(), 0.0) for term in terms)
    assert {order.token for order in first} == {4}
    assert set(first).isdisjoint(second)
    assert second == [replace(order, token=5) for order in first]


def test_a_wrong_copy_is_unloaded_and_made_elsewhere() -> None:
    """It does not count as a copy, and its worker is not told to load it again."""
    leader = Leader(EXPERTS, POLICY)
    workers = settle(leader, some_workers(3, 16), 0.0)
    key = min(workers[0].resident)
    victim = replace(
        workers[0],
        resident=workers[0].resident - {key},
        retiring=frozenset({key}),
        failed=frozenset({key}),
        wrong=frozenset({key}),
    )
    orders = leader.advance([victim, *workers[1:]], EXPERTS.no_load(), 2.0)
    told = {(order.kind, order.worker_id): order.experts for order in orders}
    assert told["unload", victim.worker_id] == (key,)
    assert key not in told.get(("load", victim.worker_id), ())
    again = leader.advance([victim, *workers[1:]], EXPERTS.no_load(), 2.1)
    assert [order for order in again if order.kind == "unload"] == [], "it was told already"
    workers = obeyed([replace(victim, retiring=frozenset()), *workers[1:]], orders)
    for order in (*orders, *again):
        leader.ended(order, (), 2.2)
    workers = settle(leader, workers, 4.0)
    assert len(copies_of(workers)[key]) == 2
    assert key not in workers[0].resident
