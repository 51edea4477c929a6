"""The chaos suite notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.harness.checks import changed, failed, longest_gap_s, stall_s, tokens_between
from tests.chaos.harness.streams import Streamed, Workload
from tests.chaos.harness.table import Row, as_markdown

WHOLE = Streamed(
    number=0,
    started_s=0.0,
    times_s=[0.1 * i for i in range(1, 21)],
    tokens=list(range(20)),
    logprobs=[-0.5] * 20,
    finish_reason="length",
)


def _with(values: list[float], index: int, value: float) -> list[float]:
    return [*values[:index], value, *values[index + 1 :]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: replace(s, tokens=_with(s.tokens, 3, 99)),
        lambda s: replace(s, logprobs=_with(s.logprobs, 19, -0.25)),
        lambda s: replace(s, tokens=[*s.tokens, 7], logprobs=[*s.logprobs, -0.5]),
        lambda s: replace(s, tokens=s.tokens[:-1], logprobs=s.logprobs[:-1]),
        lambda s: replace(s, tokens=[s.tokens[0], *s.tokens], logprobs=[-0.5, *s.logprobs]),
        lambda s: replace(s, finish_reason="stop"),
        lambda s: replace(s, error="gone", tokens=[5], logprobs=[-0.5]),
    ],
    ids=["token", "logprob", "one more", "one less", "one twice", "reason", "before an error"],
)
def test_changes_are_noticed(spoil: Callable[[Streamed], Streamed]) -> None:
    """Any difference from the answer without a fault."""
    assert len(changed([spoil(WHOLE)], {0: WHOLE})) == 1


def test_what_is_right_passes() -> None:
    """The same answer; the beginning of it before an error, which counts as failed."""
    broken = replace(WHOLE, error="gone", tokens=WHOLE.tokens[:5], logprobs=WHOLE.logprobs[:5])
    assert changed([WHOLE, broken], {0: WHOLE}) == []
    assert failed([WHOLE, broken]) == ["request 0: gone"]


def test_stall() -> None:
    """The gap that is hit, less the median; nothing from streams that were not open then."""
    late = [time_s + (0.5 if time_s > 1.0 else 0.0) for time_s in WHOLE.times_s]
    stalled = replace(WHOLE, times_s=late)
    assert stall_s([WHOLE, stalled], 1.02, 0.05) == pytest.approx(0.5)
    assert stall_s([WHOLE, stalled], 0.42, 0.05) == pytest.approx(0.0, abs=1e-9)
    assert stall_s([WHOLE, stalled], 3.0, 0.05) is None
    assert longest_gap_s([stalled]) == pytest.approx(0.6)
    assert tokens_between([WHOLE], 0.45, 0.95) == 5


def test_requests_are_the_same_in_every_run() -> None:
    """By their number; half of them greedy."""
    workload = Workload(vocab_size=100)
    bodies = [workload.body(number) for number in range(24)]
    assert bodies == [Workload(vocab_size=100).body(number) for number in range(24)]
    assert sum(body["temperature"] == 0 for body in bodies) == 12
    assert len({tuple(body["prompt"]) for body in bodies}) == 24


def test_table() -> None:
    """A line for each fault, in milliseconds."""
    row = Row("kill", times=3, requests=9, stalls_s=[0.01, 0.02, 0.05], recoveries_s=[2.0])
    lines = as_markdown([row]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert "20 / 50 ms" in lines[2]
    assert "2.0 s" in lines[2]
