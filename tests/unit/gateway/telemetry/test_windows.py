"""Windows of time: which moments are kept, what lies between two, and quantiles of it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from gateway.telemetry.history import History, Moment
from gateway.telemetry.latencies import RequestTotals, quantile_s
from gateway.telemetry.telemetry import Telemetry
from tests.support.seen_mesh import SeenMesh


def _history(num_seconds: int) -> History:
    history = History(Moment(1000.0))
    for second in range(1, num_seconds + 1):
        history.add(Moment(1000.0 + second))
    return history


@pytest.mark.parametrize(("window_s", "within_s"), [(1, 0), (10, 0), (60, 0), (300, 5)])
def test_a_window_is_as_long_as_asked_for(window_s: int, within_s: int) -> None:
    """To the second within a minute, to five of them within five minutes."""
    history = _history(1000)
    begin = history.begin_of(window_s, 2000.0)
    assert window_s <= 2000.0 - begin.at_s <= window_s + within_s
    late = history.begin_of(window_s, 2000.4)  # between two looks
    assert abs(2000.4 - late.at_s - window_s) <= within_s + 0.6


@pytest.mark.parametrize("window_s", [10, 60, 300, None])
def test_a_young_gateway_has_shorter_windows(window_s: int | None) -> None:
    """All the time there was; so is the window that has no length."""
    assert _history(4).begin_of(window_s, 1004.5).at_s == 1000.0
    assert _history(0).begin_of(window_s, 1000.1).at_s == 1000.0


def test_all_time_is_remembered() -> None:
    """However long ago that began."""
    assert _history(5000).begin_of(None, 6000.0).at_s == 1000.0


def test_what_is_kept_is_bounded() -> None:
    """The arrays of a large model take megabytes."""
    history = _history(5000)
    oldest = history.begin_of(1e9, 6000.0)
    assert oldest.at_s == 1000.0, "nothing so old is there but the first"
    assert len(history._fine) + len(history._coarse) < 140


def test_the_thread_makes_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before the window is not in it; no thread is left."""
    monkeypatch.setattr("gateway.telemetry.telemetry.INTERVAL_S", 0.01)
    monkeypatch.setattr("gateway.telemetry.history.INTERVAL_S", 0.01)
    seen = SeenMesh()
    telemetry = Telemetry(seen.sources())
    telemetry.start()
    try:
        seen.rows_LE[0, 1] = 50
        while telemetry.window(0.02).begin.gate_rows_LE[0, 1] != 50:
            pass
        seen.rows_LE[0, 1] = 57
        recent, whole = telemetry.window(0.02), telemetry.window(None)
    finally:
        telemetry.stop()
    assert recent.end.gate_rows_LE[0, 1] - recent.begin.gate_rows_LE[0, 1] == 7
    assert whole.end.gate_rows_LE[0, 1] - whole.begin.gate_rows_LE[0, 1] == 57
    assert not telemetry._thread.is_alive()


def test_quantiles_are_near_those_of_the_times() -> None:
    """Within the width of a bucket, from a tenth of a millisecond to minutes."""
    draw = random.Random(3)
    times = [10 ** draw.uniform(-3.5, 1.5) for _ in range(5000)]
    totals = RequestTotals()
    for seconds in times:
        totals.next_token(seconds)
    counts = totals.snapshot().itl
    for share in (0.01, 0.5, 0.95, 0.99):
        found = quantile_s(counts, share)
        assert found is not None
        assert abs(math.log10(found / np.quantile(times, share))) < 0.06


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-4, 1e4])
def test_times_beyond_the_buckets(seconds: float) -> None:
    """Count at the ends, not elsewhere and not as errors."""
    totals = RequestTotals()
    totals.first_token(seconds)
    found = quantile_s(totals.snapshot().ttft, 0.5)
    assert found is not None
    assert found < 2e-4 if seconds < 1 else found > 800


def test_without_times_there_is_no_quantile() -> None:
    """None is not zero."""
    assert quantile_s(RequestTotals().snapshot().e2e, 0.5) is None


def test_what_requests_came_to_in_a_window() -> None:
    """Numbers and times alike."""
    totals = RequestTotals()
    totals.started(11, 0.1)
    totals.first_token(0.2)
    totals.finished(0.5, failed=True)
    before = totals.snapshot()
    totals.started(5, 0.3)
    totals.first_token(0.4)
    totals.next_token(0.01)
    totals.finished(0.6, failed=False)
    done = totals.snapshot().since(before)
    assert (done.finished, done.failed, done.prompt_tokens, done.generation_tokens) == (1, 0, 5, 2)
    assert [int(counts.sum()) for counts in (done.queue, done.ttft, done.itl, done.e2e)] == [1] * 4
