"""Late calls, budgets for asking others, and who is asked again when."""

from __future__ import annotations

from attention_worker import trust
from attention_worker.call_times import HEDGED_SHARE, HEDGES_AT_ONCE, CallTimes, HedgeBudget
from attention_worker.link import Link
from attention_worker.trust import Trust
from expertmesh_kernels.cpu.call_times import EARLIEST_NS, LATE_FACTOR, TYPICAL, class_of

USUAL_S = 0.02
SIX_SECONDS = 12
"""Reports, two a second."""


def times_of(size: int, *took_s: float) -> CallTimes:
    """What such calls leave."""
    times = CallTimes()
    for took in took_s:
        times.see(size, TYPICAL, took)
    return times


def test_limits_follow_size_and_time() -> None:
    """Three times the peak of the class; larger classes in proportion, and never too early."""
    assert CallTimes().late_after_s(5, TYPICAL) is None
    times = times_of(5, *[USUAL_S] * 100)
    late_s = LATE_FACTOR * USUAL_S
    assert times.late_after_s(5, TYPICAL) == late_s
    assert times.late_after_s(8, TYPICAL) == 8 * late_s
    assert times.late_after_s(3, TYPICAL) == late_s
    assert times.late_after_s(5, 4 * TYPICAL) == 4 * late_s
    assert times_of(5, 0.001).late_after_s(5, TYPICAL) == EARLIEST_NS / 1e9
    assert class_of(16, 1) == class_of(0, 2) < class_of(64, 4)


def test_a_peak_rises_slowly_and_falls_more_slowly() -> None:
    """One outlier doubles it at most; when all calls take longer, a few are enough."""
    times = times_of(5, *[USUAL_S] * 300)
    times.see(5, TYPICAL, 50 * USUAL_S)
    assert times.late_after_s(5, TYPICAL) == 2 * LATE_FACTOR * USUAL_S
    for _ in range(4):
        times.see(5, TYPICAL, 8 * USUAL_S)
    assert times.late_after_s(5, TYPICAL) == LATE_FACTOR * 8 * USUAL_S
    for _ in range(2000):
        times.see(5, TYPICAL, USUAL_S)
    late_s = times.late_after_s(5, TYPICAL)
    assert late_s is not None
    assert late_s < 1.1 * LATE_FACTOR * USUAL_S


def test_slowness_is_that_of_one_expert_worker() -> None:
    """Compared with all calls of a size; the peak is not raised by who is known to be slow."""
    times, quick, slow = CallTimes(), TYPICAL, TYPICAL
    for _ in range(500):
        for _ in range(9):
            quick = times.see(5, quick, USUAL_S)
        slow = times.see(5, slow, 10 * USUAL_S)
    assert 4 < slow / quick < 16
    late_s = times.late_after_s(5, quick)
    assert late_s is not None
    assert late_s < 3 * LATE_FACTOR * USUAL_S


def test_who_is_not_asked_is_forgiven() -> None:
    """From as slow as can be, in seconds; and no quicker than the others, who are asked."""
    link = Link(incarnation=1, credits=1)
    link.slowness = 64 * TYPICAL
    for _ in range(SIX_SECONDS):
        link.forgive()
    assert TYPICAL // 2 <= link.slowness < TYPICAL
    link.slowness = TYPICAL // 3
    link.forgive()
    assert link.slowness == TYPICAL // 3


def test_what_a_call_costs_is_where_the_line_begins() -> None:
    """Calls of two sizes tell it, in experts; one size does not, nor what grows by no expert."""
    base_s, expert_s = 0.003, 0.0005
    times = CallTimes()
    for num_experts in (2, 16):
        for _ in range(30):
            times.see(class_of(0, num_experts), TYPICAL, base_s + expert_s * num_experts)
        if num_experts == 2:
            assert times.call_experts == 0
    # sizes of a class are not told apart: between 2 and 4 experts, between 16 and 32
    assert 6 <= times.call_experts <= 12
    for _ in range(2000):
        times.see(class_of(0, 16), TYPICAL, base_s / 2)
    assert times.call_experts == 64


def test_the_budget_is_a_share_of_calls() -> None:
    """So many at once, then one for each so many calls."""
    budget = HedgeBudget()
    assert [budget.take(0) for _ in range(HEDGES_AT_ONCE + 2)] == [True] * HEDGES_AT_ONCE + [
        False
    ] * 2
    per_hedge = int(1 / HEDGED_SHARE)
    assert not budget.take(per_hedge // 2)
    assert budget.take(per_hedge + 1)
    assert not budget.take(per_hedge + 2)
    assert not budget.take(0), "fewer than before: other expert workers"


def test_who_was_late_is_asked_again_once_it_is_heard_of() -> None:
    """Until then it gets probes, at times that double."""
    one = Trust()
    assert one.be_late(100.0), "the log says so"
    assert not one.be_late(100.5)
    assert one.is_suspect(200.0)
    probes = [now for now in range(100, 200) if one.wants_probe(float(now))]
    assert probes == [101, 103, 107, 115, 131, 161, 191]
    one.be_heard()
    assert not one.is_suspect(200.0)
    assert not one.wants_probe(1000.0)
    assert one.be_late(1000.0)
    one.be_heard()
    assert not one.be_late(1000.5), "the log has said so within this second"
    one.be_heard()
    assert one.be_late(1001.0)


def test_who_is_wrong_is_ejected_for_a_time_that_doubles() -> None:
    """After two wrong replies with few right ones between them."""
    one, now_s = Trust(), 100.0
    assert not one.be_wrong(now_s, 0)
    assert not one.be_wrong(now_s, trust.RIGHT_BETWEEN)
    assert not one.is_suspect(now_s)
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        assert one.be_wrong(now_s, trust.RIGHT_BETWEEN)
        one.be_heard()
        assert one.is_suspect(now_s + seconds - 0.01)
        now_s += seconds
        assert not one.is_suspect(now_s)
    num_right = trust.RIGHT_BETWEEN + trust.RIGHT_AFTER
    assert not one.be_wrong(now_s, num_right)
    assert one.be_wrong(now_s, num_right)
    assert not one.is_suspect(now_s + 1)
