"""When two micro-batches pay: `python -m bench.overlap [--json FILE]`.

The driver and the decision of the attention worker, with layers that sleep instead of computing:
the attention side for `own(n)`, the expert worker for `busy(n)`, and a network that takes `travel`
each way; an expert worker computes one call at a time. Measured whole, split, and as the decision
has it, against the model

    whole  own(n) + busy(n) + 2 travel
    split  max(2 own(n/2), own(n/2) + busy(n/2) + 2 travel, 2 busy(n/2))
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention_worker.overlap import SplitByTimes, StepTime, run_in_turn

NUM_LAYERS = 8
NUM_ROWS = 32
GROWING = (4, 8, 12, 16, 20, 24, 28)
"""Rows of the first steps for the decision: requests come one after the other."""


@dataclass(frozen=True)
class Case:
    """Times in milliseconds, fixed and for all rows of a step."""

    name: str
    own_fixed: float
    own_rows: float
    busy_fixed: float
    busy_rows: float
    travel: float

    def own_ms(self, share: float) -> float:
        """Of the attention worker, for a share of the rows."""
        return self.own_fixed + self.own_rows * share

    def busy_ms(self, share: float) -> float:
        """Of the expert worker."""
        return self.busy_fixed + self.busy_rows * share

    def model_ms(self, *, split: bool) -> float:
        """Of a layer, as the model has it."""
        if not split:
            return self.own_ms(1) + self.busy_ms(1) + 2 * self.travel
        own, busy = self.own_ms(0.5), self.busy_ms(0.5)
        return max(2 * own, own + busy + 2 * self.travel, 2 * busy)


CASES = (
    Case("balanced", 0.2, 3.0, 0.2, 3.0, 0.2),
    Case("long way", 0.2, 3.0, 0.2, 1.0, 1.0),
    Case("experts twice as long", 0.2, 2.0, 0.2, 4.0, 0.2),
    Case("attention twice as long", 0.2, 4.0, 0.2, 2.0, 0.2),
    Case("half of all is fixed", 1.5, 1.5, 1.5, 1.5, 0.2),
    Case("all is fixed", 3.0, 0.0, 3.0, 0.0, 0.2),
    Case("fixed costs of experts", 0.5, 2.5, 4.0, 0.5, 0.2),
    Case("quick experts", 0.5, 3.0, 0.1, 0.1, 0.1),
)


@dataclass(frozen=True)
class Result:
    """Of one case; times of a layer in milliseconds."""

    name: str
    whole_ms: float
    split_ms: float
    measured: float
    """Split / whole."""
    model: float
    """The same by the model."""
    chosen: float
    """Share of split steps once times are known."""
    chosen_ratio: float
    """Time of these steps / whole."""


class Step:
    """One step of a case; times of sleeping are measured, not assumed."""

    def __init__(self, case: Case, num_parts: int, num_rows: int = NUM_ROWS) -> None:
        self._case = case
        self._num_rows = num_rows
        self._share = num_rows / NUM_ROWS / num_parts
        self._worker_free_s = 0.0
        self.wait_s = 0.0
        self.busy_s = 0.0
        started_s = time.perf_counter()
        run_in_turn([self._layers() for _ in range(num_parts)])
        self.whole_s = time.perf_counter() - started_s

    def _layers(self) -> Generator[None, None, Tensor]:
        case = self._case
        for _ in range(NUM_LAYERS):
            _sleep_until(time.perf_counter() + case.own_ms(self._share) / 1000)
            came_s = time.perf_counter() + case.travel / 1000
            busy_s = case.busy_ms(self._share) / 1000
            self._worker_free_s = max(self._worker_free_s, came_s) + busy_s
            self.busy_s += busy_s
            back_s = self._worker_free_s + case.travel / 1000
            yield
            waits_from_s = time.perf_counter()
            _sleep_until(back_s)
            self.wait_s += time.perf_counter() - waits_from_s
        return torch.empty(0)

    def time(self, num_parts: int) -> StepTime:
        """What the decision learns."""
        own_s = self.whole_s - self.wait_s
        return StepTime(self._num_rows, own_s, self.wait_s, self.busy_s, num_parts > 1)


def _sleep_until(then_s: float) -> None:
    """Sleeps, and spins the last bit, since a sleep ends late."""
    left_s = then_s - time.perf_counter() - 0.0002
    if left_s > 0:
        time.sleep(left_s)
    while time.perf_counter() < then_s:
        pass


def measure(case: Case, num_steps: int) -> Result:
    """Whole and split steps in turn, then steps as the decision has them."""
    whole, split = [], []
    for _ in range(num_steps):
        whole.append(Step(case, 1).whole_s)
        split.append(Step(case, 2).whole_s)
    splitter, chosen = SplitByTimes(), []
    for number in range(3 * num_steps):
        num_rows = GROWING[number] if number < len(GROWING) else NUM_ROWS
        num_parts = 2 if splitter.should_split(num_rows) else 1
        step = Step(case, num_parts, num_rows)
        splitter.see(step.time(num_parts))
        chosen.append((num_parts, step.whole_s))
    settled = chosen[num_steps:]
    per_layer = 1000 / NUM_LAYERS
    whole_s, split_s = statistics.median(whole), statistics.median(split)
    return Result(
        case.name,
        whole_s * per_layer,
        split_s * per_layer,
        split_s / whole_s,
        case.model_ms(split=True) / case.model_ms(split=False),
        sum(parts == 2 for parts, _ in settled) / len(settled),
        statistics.mean(seconds for _, seconds in settled) / whole_s,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="whole and split ones of each case")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    print("a layer in ms; ratios to whole steps; chosen: share of split steps, and their time")
    print(
        f"{'case':<26}{'whole':>8}{'split':>8}{'measured':>10}{'model':>8}{'chosen':>9}{'ratio':>8}"
    )
    results = []
    for case in CASES:
        result = measure(case, options.steps)
        results.append(result)
        print(
            f"{result.name:<26}{result.whole_ms:>8.2f}{result.split_ms:>8.2f}"
            f"{result.measured:>10.2f}{result.model:>8.2f}{result.chosen:>8.0%}"
            f"{result.chosen_ratio:>9.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
