"""Which expert workers are scaled, and how many it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.report import PlacementReport
from gateway.placement.state import PlacementPolicy
from gateway.scaling.fleet import fleet_of, members_of, serving
from gateway.scaling.policy import Fleet
from tests.support.placements import some_experts, some_workers

EXPERTS = some_experts()  # 16 pairs
REPORT = PlacementReport(EXPERTS, PlacementPolicy(min_copies=2), token=1)


def known(num_workers: int, num_slots: int = 16, name: str = "expert-worker-") -> list[KnownWorker]:
    """NAME0, NAME1, ..."""
    views = some_workers(num_workers, num_slots, prefix=name)
    return [KnownWorker("", view, {}) for view in views]


def fleet(desired: int, workers: list[KnownWorker], staying: int | None = None) -> Fleet:
    """The fleet of these."""
    members = members_of("expert-worker", workers)
    return fleet_of(members, desired, desired if staying is None else staying, REPORT)


def test_members_are_named_like_their_pods() -> None:
    """Other expert workers are none of its business."""
    names = [
        "expert-worker-0",
        "expert-worker-12",
        "expert-worker-3-50061",
        "expert-worker-4:50061",
    ]
    others = ["expert-worker", "expert-worker-x", "my-expert-worker-1", "expert-worker-12a"]
    views = some_workers(1, 4)
    workers = [KnownWorker("", replace(views[0], worker_id=n), {}) for n in (*names, *others)]
    members = members_of("expert-worker", workers)
    assert [members[n].view.worker_id for n in sorted(members)] == [
        names[0], names[2], names[3], names[1],
    ]  # fmt: skip


def test_who_is_present() -> None:
    """Neither those beyond the number nor those that leave."""
    workers = known(4)
    workers[1] = replace(workers[1], view=replace(workers[1].view, leaving=True))
    assert sorted(serving(members_of("expert-worker", workers), 3)) == [0, 2]
    assert fleet(5, workers).present == 3
    assert fleet(5, workers).num_booting == 2
    assert fleet(5, workers, staying=3).present == 2


@pytest.mark.parametrize(
    ("num_workers", "num_slots", "can_shrink", "needed"),
    [
        (3, 16, True, 2),  # each holds everything
        (2, 16, False, 2),  # two copies need two
        (4, 12, True, 2),  # 33 slots are left of 32
        (3, 12, False, 2),
        (4, 9, False, 2),  # 32 slots, as one of each is free for moves
        (3, 9, False, 4),
        (2, 9, False, 4),
        (2, 2, False, 32),
        (1, 1, False, 0),  # no room to go by
        (0, 16, False, 0),
    ],
)
def test_how_many_hold_all_copies(
    num_workers: int, num_slots: int, can_shrink: bool, needed: int
) -> None:
    """By their slots, of which one stays free for moves unless everything fits."""
    found = fleet(num_workers, known(num_workers, num_slots))
    assert (found.can_shrink, found.num_for_copies) == (can_shrink, needed)


def test_experts_without_a_copy_are_counted() -> None:
    """By what is resident, not by what is planned."""
    views = [replace(view, resident=frozenset({(1, 0), (3, 7)})) for view in some_workers(2, 16)]
    report = replace(REPORT, workers=tuple(views))
    assert fleet_of({}, 2, 2, report).num_uncovered == 14
