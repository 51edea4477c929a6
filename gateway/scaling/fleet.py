"""Which expert workers belong to the StatefulSet that is scaled, and what they have room for.

Pods are named NAME-0, NAME-1, ...; an expert worker is named like its pod, perhaps with something
behind it. The highest ordinals are the first to go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gateway.mesh.worker_report import KnownWorker
from gateway.placement.report import PlacementReport
from gateway.placement.state import WorkerView
from gateway.scaling.policy import Fleet

Members = Mapping[int, KnownWorker]
"""Expert workers by the ordinal of their pod."""


def members_of(name: str, known: Iterable[KnownWorker]) -> Members:
    """Those of a StatefulSet.

    Args:
        name: Of the StatefulSet.
        known: Expert workers that answer and fit.
    """
    pattern = re.compile(rf"{re.escape(name)}-(\d+)([-.:].*)?")
    found: dict[int, KnownWorker] = {}
    for worker in known:
        if match := pattern.fullmatch(worker.view.worker_id):
            found[int(match[1])] = worker
    return found


def serving(members: Members, desired: int) -> Members:
    """Those that serve and are to stay if there are to be so many."""
    return {
        ordinal: worker
        for ordinal, worker in members.items()
        if ordinal < desired and not worker.view.leaving
    }


def fleet_of(members: Members, desired: int, staying: int, placement: PlacementReport) -> Fleet:
    """The expert workers now.

    Args:
        members: Of the StatefulSet.
        desired: As many as it is to have.
        staying: As many of them as do not hand over.
        placement: What they are to hold.
    """
    num_pairs, min_copies = placement.experts.num_pairs, placement.policy.min_copies
    present = serving(members, staying)
    slots = [_slots(worker.view, num_pairs) for worker in present.values()]
    left = [_slots(worker.view, num_pairs) for worker in serving(members, desired - 1).values()]
    return Fleet(
        desired=desired,
        present=len(present),
        num_for_copies=_num_for_copies(slots, num_pairs, min_copies),
        can_shrink=len(left) >= min_copies and sum(left) >= num_pairs * min_copies,
        num_uncovered=num_pairs - len(placement.num_copies),
    )


def _slots(view: WorkerView, num_pairs: int) -> int:
    """Slots for copies: one stays free for moves, unless there is room for everything."""
    return num_pairs if view.num_slots >= num_pairs else max(0, view.num_slots - 1)


def _num_for_copies(slots: list[int], num_pairs: int, min_copies: int) -> int:
    """Expert workers that hold all copies, if further ones are like the smallest of these.

    0 if there is none to go by.
    """
    fewest = min(slots, default=0)
    missing = num_pairs * min_copies - sum(slots)
    if not fewest:
        return 0
    return (
        max(min_copies, len(slots) + max(0, -(-missing // fewest))) if missing > 0 else min_copies
    )
