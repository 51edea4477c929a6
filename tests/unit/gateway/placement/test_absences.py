"""Lost workers are remembered for a while."""

from __future__ import annotations

from dataclasses import replace

from gateway.placement.absences import Absences
from tests.support.placements import some_workers


def test_a_lost_worker_is_absent_until_it_comes_back_or_patience_ends() -> None:
    """Its last view is kept, marked; a new incarnation takes its place."""
    first, second = some_workers(2, 4)
    absences = Absences(patience_s=10.0)
    assert absences.observe([first, second], 0.0) == [first, second]
    absent = replace(second, absent=True)
    assert absences.observe([first], 1.0) == [first, absent]
    assert absences.next_end_s() == 11.0
    assert absences.observe([first], 10.9) == [first, absent]
    back = replace(second, incarnation=9)
    assert absences.observe([first, back], 10.9) == [first, back]
    assert absences.next_end_s() is None
    assert absences.observe([first], 20.0) == [first, replace(back, absent=True)]
    assert absences.observe([first], 30.0) == [first]


def test_a_worker_that_was_leaving_is_not_missed() -> None:
    """It went as it was told."""
    first, second = some_workers(2, 4)
    absences = Absences(patience_s=10.0)
    absences.observe([first, replace(second, leaving=True)], 0.0)
    assert absences.observe([first], 1.0) == [first]
