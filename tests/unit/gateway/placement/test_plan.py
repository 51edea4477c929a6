"""Plans: complete, spread, and with as few changes as will do."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.placement.plan import plan
from gateway.placement.state import Experts, PlacementPolicy, Plan, WorkerView
from tests.support.placements import (
    carried_out,
    copies_of,
    moved_copies,
    some_experts,
    some_workers,
    zipf_load,
)

POLICY = PlacementPolicy()
SMALL = some_experts()


def check_plan(experts: Experts, workers: list[WorkerView], made: Plan, min_copies: int) -> None:
    """What holds for every plan."""
    stay = [view for view in workers if not view.leaving]
    slots = {view.worker_id: view.num_slots for view in stay}
    assert set(made.target) == set(slots)
    assert all(len(keys) <= slots[name] for name, keys in made.target.items())
    copies = made.num_copies()
    everything = {(layer, e) for layer in experts.moe_layers for e in range(experts.num_experts)}
    assert set(copies) | set(made.unplaced) == everything
    assert set(copies).isdisjoint(made.unplaced)
    used = [min(view.num_slots, experts.num_pairs) for view in stay]
    if len(set(used)) == 1:  # else one worker may have slots that no other copy can use
        safe = min(min_copies, len(stay))
        if sum(used) >= safe * experts.num_pairs:
            assert min(copies.values()) >= safe
    if made.unplaced:
        # Less than a slot a layer is left over by sharing slots out evenly.
        assert sum(used) < experts.num_pairs + len(experts.moe_layers) * len(stay)


worker_lists = st.lists(
    st.builds(
        WorkerView,
        worker_id=st.sampled_from([f"w{i}" for i in range(7)]),
        incarnation=st.just(1),
        node=st.sampled_from(["a", "b", "c"]),
        num_slots=st.integers(0, 40),
        leaving=st.booleans(),
        absent=st.just(False),
    ),
    max_size=6,
    unique_by=lambda view: view.worker_id,
)


@given(
    workers=worker_lists,
    num_experts=st.integers(1, 13),
    num_layers=st.integers(1, 3),
    min_copies=st.integers(1, 4),
    exponent=st.sampled_from([0.0, 0.7, 2.0]),
    seed=st.integers(0, 999),
)
def test_any_workers_any_experts(
    workers: list[WorkerView],
    num_experts: int,
    num_layers: int,
    min_copies: int,
    exponent: float,
    seed: int,
) -> None:
    """No divisibility rules: slots are kept to, all is placed that fits, and plans are stable.

    A plan that was carried out is not changed, whether it is remembered or read from workers.
    """
    experts = some_experts(num_layers, num_experts)
    policy = PlacementPolicy(min_copies)
    load = zipf_load(experts, exponent, seed)
    random = np.random.default_rng(seed)
    keys = [(layer, e) for layer in experts.moe_layers for e in range(num_experts)]
    held = [
        frozenset(keys[i] for i in random.permutation(len(keys))[: random.integers(most + 1)])
        for most in (view.num_slots for view in workers)
    ]
    workers = [replace(view, resident=mine) for view, mine in zip(workers, held, strict=True)]
    made = plan(experts, workers, load, policy)
    check_plan(experts, workers, made, min_copies)
    after = carried_out(workers, made.target)
    assert plan(experts, after, load, policy, made.target).target == made.target
    again = plan(experts, after, load, policy)
    assert again.target == made.target
    present = {key for view in workers for key in view.resident}
    assert set(made.uncovered) == set(keys) - present


def test_a_plan_for_nobody_says_that_nothing_is_covered() -> None:
    """Without workers all experts are uncovered and unplaced."""
    made = plan(SMALL, [], SMALL.no_load(), POLICY)
    assert len(made.uncovered) == len(made.unplaced) == SMALL.num_pairs
    assert made.target == {}
    assert "16 experts have no copy" in made.why


def test_copies_are_on_different_nodes() -> None:
    """With two nodes of two workers each, no expert has both copies on one."""
    workers = some_workers(4, 16, num_nodes=2)
    made = plan(SMALL, workers, SMALL.no_load(), POLICY)
    node_of = {view.worker_id: view.node for view in workers}
    for holders in copies_of(carried_out(workers, made.target)).values():
        assert len({node_of[name] for name in holders}) == 2


@pytest.mark.parametrize(
    ("num_workers", "min_copies"),
    [(w, c) for w in (1, 2, 3, 5, 9, 16) for c in (1, 2, 3) if c <= w],
)
def test_a_joining_worker_moves_its_share_alone(num_workers: int, min_copies: int) -> None:
    """A worker that joins W others gets 1/(W+1) of all copies; none moves between the others.

    Shares are whole experts, so it is one expert of a layer more at most. With 50 names of it.
    """
    experts = some_experts(2, 64)
    policy = PlacementPolicy(min_copies)
    old = some_workers(num_workers, experts.num_pairs)
    first = plan(experts, old, experts.no_load(), policy)
    num_copies = min_copies * experts.num_experts
    for seed in range(50):
        workers = [*carried_out(old, first.target), *some_workers(1, 128, prefix=f"new{seed}-")]
        made = plan(experts, workers, experts.no_load(), policy, first.target)
        joined = made.target[workers[-1].worker_id]
        assert moved_copies(workers, made.target) == len(joined)
        assert len(joined) <= 2 * (num_copies // (num_workers + 1) + 1)
        assert len(joined) >= 2 * (num_copies // (num_workers + 1))


def test_a_lost_workers_share_goes_to_the_others() -> None:
    """Only the copies that were lost are made anew, and evenly."""
    experts = some_experts(2, 64)
    workers = some_workers(5, experts.num_pairs)
    first = plan(experts, workers, experts.no_load(), POLICY)
    left = carried_out(workers, first.target)[1:]
    made = plan(experts, left, experts.no_load(), POLICY, first.target)
    num_lost = len(first.target["w0"])
    assert moved_copies(left, made.target) <= num_lost + 2
    sizes = [len(keys) for keys in made.target.values()]
    assert max(sizes) - min(sizes) <= len(experts.moe_layers)


def test_an_absent_workers_share_waits_but_not_for_sole_copies() -> None:
    """Experts that only the absent worker held are placed elsewhere, nothing else is."""
    workers = some_workers(4, 16)
    policy = PlacementPolicy(min_copies=1)
    first = plan(SMALL, workers, SMALL.no_load(), policy)
    views = carried_out(workers, first.target)
    gone = replace(views[0], absent=True)
    made = plan(SMALL, [gone, *views[1:]], SMALL.no_load(), policy, first.target)
    loaded = {key for view in views[1:] for key in made.target[view.worker_id] - view.resident}
    assert loaded == first.target["w0"]
    two = PlacementPolicy(min_copies=2)
    first = plan(SMALL, workers, SMALL.no_load(), two)
    views = carried_out(workers, first.target)
    gone = replace(views[0], absent=True)
    made = plan(SMALL, [gone, *views[1:]], SMALL.no_load(), two, first.target)
    assert made.target == first.target


def test_a_leaving_worker_gets_nothing() -> None:
    """What it holds is planned elsewhere."""
    workers = some_workers(3, 16)
    first = plan(SMALL, workers, SMALL.no_load(), POLICY)
    views = carried_out(workers, first.target)
    views[0] = replace(views[0], leaving=True)
    made = plan(SMALL, views, SMALL.no_load(), POLICY, first.target)
    assert set(made.target) == {"w1", "w2"}
    assert min(made.num_copies().values()) == 2
    assert "w0 leaving" in made.why


def test_hot_experts_are_parted() -> None:
    """Two hot experts on one worker are parted by a single exchange."""
    policy = PlacementPolicy(min_copies=1)
    workers = some_workers(2, 8)
    experts = some_experts(1, 8)
    first = plan(experts, workers, experts.no_load(), policy)
    views = carried_out(workers, first.target)
    load = experts.no_load()
    for _, expert in sorted(first.target["w0"])[:2]:
        load[0, expert] = 9e6
    load += 1e5
    made = plan(experts, views, load, policy, first.target)
    assert made.imbalance_before > 1.8
    assert made.imbalance_after < 1.1
    assert moved_copies(views, made.target) == 2
    assert "2 of these for load" in made.why


def test_an_expert_that_is_too_hot_for_one_worker_gets_copies() -> None:
    """An expert with half of the load gets copies on half of the workers, and keeps them."""
    policy = PlacementPolicy(min_copies=1)
    workers = some_workers(4, 16)
    experts = some_experts(1, 16)
    load = experts.no_load() + 1e5
    load[0, 3] = 15e5
    made = plan(experts, workers, load, policy)
    assert made.num_copies()[1, 3] == 2
    views = carried_out(workers, made.target)
    load[0, 3] = 14e5 * 0.6
    assert plan(experts, views, load, policy, made.target).num_copies()[1, 3] == 2
    load[0, 3] = 1e5
    assert plan(experts, views, load, policy, made.target).num_copies()[1, 3] == 1


@pytest.mark.parametrize("seed", range(5))
def test_nothing_moves_for_a_small_gain(seed: int) -> None:
    """Loads that change by some percent change nothing, again and again."""
    experts = some_experts(4, 32)
    policy = PlacementPolicy(min_copies=1)
    workers = some_workers(4, experts.num_pairs)
    load = zipf_load(experts, 0.8, seed)
    made = plan(experts, workers, load, policy)
    random = np.random.default_rng(seed)
    for _ in range(20):
        noisy = load * random.uniform(0.96, 1.04, load.shape)
        views = carried_out(workers, made.target)
        assert plan(experts, views, noisy, policy, made.target).target == made.target


def test_few_pairs_say_little() -> None:
    """A skewed sample of some pairs moves nothing."""
    experts = some_experts(1, 8)
    policy = PlacementPolicy(min_copies=1)
    workers = some_workers(2, 8)
    first = plan(experts, workers, experts.no_load(), policy)
    load = experts.no_load()
    load[0, [e for _, e in first.target["w0"]]] = 5.0
    made = plan(experts, carried_out(workers, first.target), load, policy, first.target)
    assert made.target == first.target


def test_an_expert_that_failed_to_load_goes_elsewhere() -> None:
    """A worker that could not load an expert is not planned to hold it."""
    workers = some_workers(3, 16)
    first = plan(SMALL, workers, SMALL.no_load(), POLICY)
    failed = frozenset(sorted(first.target["w1"])[:3])
    workers[1] = replace(workers[1], failed=failed)
    made = plan(SMALL, workers, SMALL.no_load(), POLICY)
    assert failed.isdisjoint(made.target["w1"])
    assert min(made.num_copies().values()) == 2


def test_a_large_mesh_is_planned_quickly() -> None:
    """61 layers x 256 experts on 16 workers: well below a second, also with a skewed load."""
    experts = some_experts(61, 256)
    workers = some_workers(16, 61 * 40)
    times, made = [], None
    for load in (experts.no_load(), zipf_load(experts, 1.0, 1)):
        started_s = time.process_time()
        made = plan(experts, workers, load, POLICY, made.target if made else None)
        times.append(time.process_time() - started_s)
    assert made is not None
    assert made.imbalance_after < 1.2
    assert max(times) < 5.0, times  # some 0.3 s; a slow machine has ten times as long
