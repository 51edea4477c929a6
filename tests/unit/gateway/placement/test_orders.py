"""Orders: urgent things first, nothing given up too early, and nothing without bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.placement.move_budget import MoveBudget
from gateway.placement.orders import next_orders
from gateway.placement.plan import plan
from gateway.placement.state import Order, PlacementPolicy, Plan, WorkerView
from tests.support.placements import carried_out, copies_of, obeyed, some_experts, some_workers

POLICY = PlacementPolicy()
SMALL = some_experts()
AMPLE = 1 << 40


def made_plan(workers: list[WorkerView], policy: PlacementPolicy = POLICY) -> Plan:
    """A plan without load."""
    return plan(SMALL, workers, SMALL.no_load(), policy)


def orders_for(
    made: Plan,
    workers: list[WorkerView],
    pending: tuple[Order, ...] = (),
    *,
    policy: PlacementPolicy = POLICY,
    nbytes: int = AMPLE,
) -> list[Order]:
    """Orders at time 0, with a budget of so many bytes in all."""
    budget = MoveBudget(6 * nbytes, SMALL.expert_nbytes, burst_s=10.0)
    return next_orders(made, workers, pending, policy, 0.0, budget)


def loads_of(orders: list[Order]) -> list[tuple[str, tuple[int, int]]]:
    """(worker id, expert) of all loads."""
    return [(o.worker_id, key) for o in orders if o.kind == "load" for key in o.experts]


def test_uncovered_experts_come_first_and_ask_no_budget() -> None:
    """Without budget each uncovered expert is loaded once, and no further copy."""
    workers = some_workers(3, 16)
    made = made_plan(workers)
    orders = orders_for(made, workers, nbytes=0)
    assert sorted(key for _, key in loads_of(orders)) == list(made.uncovered)
    with_budget = loads_of(orders_for(made, workers))
    assert len(with_budget) == 32
    assert sorted(key for _, key in with_budget) == sorted(2 * made.uncovered)


def test_urgent_loads_are_shared_and_the_first_of_an_order() -> None:
    """What nobody holds is in front of what has a copy, and half of it goes to each worker."""
    workers = some_workers(2, 16)
    made = made_plan(workers)
    half = frozenset(key for key in made.target["w0"] if key[1] < 4)
    workers[0] = replace(workers[0], resident=half)
    for order in orders_for(made, workers):
        assert half.isdisjoint(order.experts[:4])
    urgent = orders_for(made, workers, nbytes=0)
    assert [len(order.experts) for order in urgent] == [4, 4]


def test_only_leaving_workers_hold_them_is_urgent() -> None:
    """A worker's sole copies are loaded elsewhere without asking for budget."""
    workers = some_workers(3, 16)
    views = carried_out(workers, made_plan(workers, PlacementPolicy(1)).target)
    views[0] = replace(views[0], leaving=True)
    made = made_plan(views)
    loads = loads_of(orders_for(made, views, nbytes=0))
    assert {key for _, key in loads} == views[0].resident
    assert {name for name, _ in loads} <= {"w1", "w2"}


def test_the_budget_bounds_what_is_not_urgent() -> None:
    """As many bytes as the bucket has, and one expert more."""
    workers = some_workers(3, 16)
    views = carried_out(workers, made_plan(workers, PlacementPolicy(1)).target)
    made = made_plan(views)
    assert len(loads_of(orders_for(made, views))) >= 16
    assert len(loads_of(orders_for(made, views, nbytes=4500))) == 5


def test_loads_are_bounded_for_each_worker() -> None:
    """With those that are pending, a worker never has more than so many."""
    workers = some_workers(2, 16)
    policy = PlacementPolicy(loads_at_a_time=5)
    made = made_plan(workers)
    orders = orders_for(made, workers, policy=policy)
    assert [len(order.experts) for order in orders] == [5, 5]
    assert orders_for(made, workers, tuple(orders), policy=policy) == []
    some = replace(orders[0], experts=orders[0].experts[:2])
    more = orders_for(made, workers, (some, orders[1]), policy=policy)
    assert [(order.worker_id, len(order.experts)) for order in more] == [("w0", 3)]


def test_orders_are_not_given_twice() -> None:
    """What is pending is not ordered again, but for another incarnation it is."""
    workers = some_workers(2, 16)
    made = made_plan(workers)
    orders = orders_for(made, workers)
    assert orders_for(made, workers, tuple(orders)) == []
    workers[0] = replace(workers[0], incarnation=7)
    again = orders_for(made, workers, tuple(orders))
    assert [(o.worker_id, o.incarnation, len(o.experts)) for o in again] == [("w0", 7, 16)]


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_copy_is_added_before_another_is_given_up(num_copies: int) -> None:
    """At each moment of a move all experts have as many copies as before."""
    policy = PlacementPolicy(num_copies)
    workers = some_workers(3, 16)
    views = carried_out(workers, made_plan(workers, policy).target)
    views += some_workers(1, 16, prefix="new")
    made = made_plan(views, policy)
    for _ in range(10):
        orders = orders_for(made, views, policy=policy)
        views = obeyed(views, [order for order in orders if order.kind == "unload"])
        assert min(len(holders) for holders in copies_of(views).values()) >= num_copies
        views = obeyed(views, [order for order in orders if order.kind == "load"])
        assert min(len(holders) for holders in copies_of(views).values()) >= num_copies
    assert views == carried_out(views, made.target)


def test_pending_unloads_do_not_count_as_copies() -> None:
    """Two workers are not told one after the other to give up the last copies of an expert."""
    workers = some_workers(3, 16)
    key = (1, 0)
    views = [replace(view, resident=frozenset({key})) for view in workers]
    made = Plan({"w0": frozenset({key}), "w1": frozenset(), "w2": frozenset()}, (), (), 1, 1, "")
    orders = orders_for(made, views)
    assert [order.worker_id for order in orders] == ["w1", "w2"]
    moved = Plan({"w0": frozenset(), "w1": frozenset({key}), "w2": frozenset()}, (), (), 1, 1, "")
    pending = (Order("unload", "w1", 101, (key,)), Order("unload", "w2", 102, (key,)))
    assert orders_for(moved, views, pending) == []


def test_a_retiring_expert_comes_back_without_a_slot() -> None:
    """It is in memory still: loading it takes neither a slot nor budget."""
    key, other = (1, 0), (1, 1)
    view = WorkerView("w0", 1, "n", 2, frozenset({other}), frozenset({key}))
    holder = WorkerView("w1", 2, "m", 2, frozenset({key, other}))
    made = Plan({"w0": frozenset({key, other}), "w1": frozenset({key, other})}, (), (), 1, 1, "")
    assert orders_for(made, [view, holder], nbytes=0) == [Order("load", "w0", 1, (key,))]


def test_a_full_worker_makes_room_where_one_copy_is_left() -> None:
    """A load that no slot is free for: an expert with one copy elsewhere makes way."""
    first, second, third = (1, 0), (1, 1), (1, 2)
    views = [
        WorkerView("w0", 1, "n", 1, frozenset({first})),
        WorkerView("w1", 2, "m", 2, frozenset({first, second})),
    ]
    target = {"w0": frozenset({third}), "w1": frozenset({first, second})}
    made = Plan({**target, "w2": frozenset({first})}, (third,), (), 1, 1, "")
    assert orders_for(made, views) == [Order("unload", "w0", 1, (first,))]
    freeing = [replace(views[0], resident=frozenset(), retiring=frozenset({first})), views[1]]
    assert orders_for(made, freeing) == []


def test_the_last_copy_is_never_given_up() -> None:
    """Not even when it is not planned, on a worker that is leaving, or for lack of slots."""
    first, second = (1, 0), (1, 1)
    view = WorkerView("w0", 1, "n", 1, frozenset({first}))
    made = Plan({"w0": frozenset({second})}, (second,), (first,), 1, 1, "")
    assert orders_for(made, [view]) == []
    gone = replace(view, leaving=True)
    empty = WorkerView("w1", 1, "n", 0)
    assert orders_for(Plan({"w1": frozenset()}, (), (), 1, 1, ""), [gone, empty]) == []


def test_a_leaving_worker_is_freed_of_what_is_elsewhere() -> None:
    """It is told to unload what has its planned copies elsewhere, and to load nothing."""
    workers = some_workers(3, 16)
    views = carried_out(workers, made_plan(workers).target)
    views[0] = replace(views[0], leaving=True)
    made = made_plan(views)
    for _ in range(4):
        orders = orders_for(made, views)
        assert all(order.kind == "unload" for order in orders if order.worker_id == "w0")
        views = obeyed(views, orders)
    assert views[0].resident == frozenset()
    assert min(len(holders) for holders in copies_of(views).values()) == 2


def test_absent_workers_get_no_orders() -> None:
    """Nobody would hear them."""
    workers = some_workers(3, 16)
    workers[1] = replace(workers[1], absent=True)
    orders = orders_for(made_plan(workers), workers)
    assert {order.worker_id for order in orders} == {"w0", "w2"}


def test_a_budget_flows_in_with_time_and_is_bounded() -> None:
    """60 bytes a minute are one a second; ten seconds' worth are saved up; debt is paid first."""
    budget = MoveBudget(60, expert_nbytes=4, burst_s=10.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.take(2.0)
    assert budget.take(2.5)
    assert [budget.take(1000.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.take(900.0), "a clock that goes back adds nothing"
