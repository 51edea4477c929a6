"""Load from counters, and waits from counts."""

from __future__ import annotations

import pytest

from expertmesh.call_waits import WAIT_BOUNDS_S, wait_quantile_s
from gateway.mesh.worker_report import KnownWorker, WorkCounters
from gateway.scaling.load_meter import LoadMeter, MeasuredLoad
from tests.support.placements import some_workers

VIEWS = some_workers(3, 4)
NO_CALLS = (0,) * (len(WAIT_BOUNDS_S) + 1)


def counted(*work: WorkCounters) -> list[KnownWorker]:
    """Expert workers with these counters."""
    return [KnownWorker("", view, {}, own) for view, own in zip(VIEWS, work, strict=False)]


def calls(*counts: tuple[int, int]) -> tuple[int, ...]:
    """(bucket, calls)."""
    waits = list(NO_CALLS)
    for bucket, count in counts:
        waits[bucket] += count
    return tuple(waits)


def test_share_of_the_time_since_the_last_look() -> None:
    """On the mean over those that were there before and were heard of since."""
    meter = LoadMeter()
    first = [WorkCounters(100.0, 90.0, NO_CALLS), WorkCounters(50.0, 0.0, NO_CALLS)]
    assert meter.look(counted(*first)) is None
    later = [WorkCounters(110.0, 98.0, NO_CALLS), WorkCounters(60.0, 4.0, NO_CALLS)]
    new = WorkCounters(1.0, 1.0, NO_CALLS)
    assert meter.look(counted(*later, new)) == MeasuredLoad(pytest.approx(0.6), 0.0)
    silent, newer = later[0], WorkCounters(70.0, 14.0, NO_CALLS)
    assert meter.look(counted(silent, newer)) == MeasuredLoad(pytest.approx(1.0), 0.0)
    assert meter.look(counted(silent, newer)) is None
    meter.forget()
    assert meter.look(counted(WorkCounters(120.0, 99.0, NO_CALLS))) is None


def test_waits_of_all_of_them_together() -> None:
    """Of the calls since the last look alone."""
    meter = LoadMeter()
    before = calls((14, 1000))
    meter.look(counted(WorkCounters(1.0, 0.0, before), WorkCounters(1.0, 0.0, before)))
    slow, quick = calls((14, 1000), (9, 10)), calls((14, 1000), (0, 90))
    load = meter.look(counted(WorkCounters(2.0, 0.0, slow), WorkCounters(2.0, 0.0, quick)))
    assert load is not None
    assert load.wait_s == pytest.approx((WAIT_BOUNDS_S[8] + WAIT_BOUNDS_S[9]) / 2)


def test_quantiles_of_waits() -> None:
    """Between two bounds by proportion; without calls nobody waited."""
    assert wait_quantile_s(NO_CALLS, 0.95) == 0.0
    assert wait_quantile_s(calls((0, 7)), 1.0) == WAIT_BOUNDS_S[0]
    assert wait_quantile_s(calls((3, 100)), 0.5) == pytest.approx(0.75e-3)
    assert wait_quantile_s(calls((0, 96), (14, 4)), 0.95) < WAIT_BOUNDS_S[0]
    assert wait_quantile_s(calls((0, 94), (14, 6)), 0.95) > WAIT_BOUNDS_S[-1]
    assert WAIT_BOUNDS_S[-1] == pytest.approx(1.024)
