"""Deadlines: each request is overdue once, at its own time, whatever others did."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.deadlines import Deadlines
from gateway.sequence import GenerationRequest, SamplingParams


def request(name: str, arrival_s: float, deadline_s: float | None = None) -> GenerationRequest:
    """A request that must be done at a time."""
    params = SamplingParams(max_tokens=1)
    return GenerationRequest(
        name, (1,), params, lambda output: None, arrival_s, deadline_s=deadline_s
    )


def test_without_requests_there_is_no_deadline() -> None:
    """Nothing is overdue, and nothing is to be waited for."""
    assert Deadlines(10.0).wait_s(5.0) == math.inf
    assert Deadlines(10.0).overdue(5.0) == []


def test_the_own_deadline_and_the_longest_time_both_hold() -> None:
    """Whichever comes first."""
    deadlines = Deadlines(10.0)
    deadlines.add(request("patient", 0.0, 50.0))
    deadlines.add(request("quick", 0.0, 3.0))
    assert deadlines.wait_s(1.0) == 2.0
    assert deadlines.overdue(3.0) == ["quick"]
    assert deadlines.overdue(9.9) == []
    assert deadlines.overdue(10.0) == ["patient"]


def test_an_id_that_is_used_again_has_its_new_deadline() -> None:
    """The deadline of an ended request does not end the next one with its id."""
    deadlines = Deadlines(100.0)
    deadlines.add(request("a", 0.0, 3.0))
    deadlines.forget("a")
    deadlines.add(request("a", 1.0, 60.0))
    assert deadlines.overdue(59.0) == []
    assert deadlines.overdue(60.0) == ["a"]


events = st.lists(
    st.tuples(st.sampled_from(["add", "forget", "look"]), st.sampled_from("abc"), st.integers(1, 9))
)


@given(events=events, num_others=st.sampled_from([0, 200]))
def test_any_order_of_events(events: list[tuple[str, str, int]], num_others: int) -> None:
    """Against a plain table, with and without many requests that came and went."""
    deadlines, now_s = Deadlines(6.0), 0.0
    known: dict[str, float] = {}
    for index in range(num_others):
        deadlines.add(request(f"other {index}", 0.0))
        deadlines.forget(f"other {index}")
    for kind, name, number in events:
        now_s += 1.0
        if kind == "add" and name not in known:
            deadlines.add(request(name, now_s, now_s + number))
            known[name] = now_s + min(number, 6.0)
        elif kind == "forget":
            deadlines.forget(name)
            known.pop(name, None)
        elif kind == "look":
            due = sorted(other for other, at_s in known.items() if at_s <= now_s)
            assert sorted(deadlines.overdue(now_s)) == due
            known = {other: at_s for other, at_s in known.items() if at_s > now_s}
        next_s = min(known.values(), default=math.inf)
        assert deadlines.wait_s(now_s) <= max(0.0, next_s - now_s)
