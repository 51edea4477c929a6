"""What the parity tests measured against transformers: written line by line, read as one table.

If the environment variable PARITY_RESULTS names a file, each test appends a JSON object a line, so
that tests of several processes and runs can share it:

    {"model_type": "mixtral", "layout": "colocated", "max_logit_difference": 1.9e-06,
     "tokens_equal": 96, "tokens_compared": 96}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

VARIABLE = "PARITY_RESULTS"

Layout = Literal["colocated", "2 expert workers"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class ParityResult:
    """A model of a family in one layout, compared with transformers in FP32."""

    model_type: str
    layout: Layout
    max_logit_difference: float
    """Largest absolute difference of a logit, over the same tokens."""
    tokens_equal: int
    """Greedy tokens that are the same."""
    tokens_compared: int

    def __post_init__(self) -> None:
        assert self.layout in LAYOUTS, f"layout {self.layout!r}, expected one of {LAYOUTS}"
        assert self.max_logit_difference >= 0, "NaN or negative difference"
        assert 0 <= self.tokens_equal <= self.tokens_compared, "more equal than compared"

    def merged(self, other: ParityResult) -> ParityResult:
        """Both together: the larger difference, all tokens."""
        return ParityResult(
            self.model_type,
            self.layout,
            max(self.max_logit_difference, other.max_logit_difference),
            self.tokens_equal + other.tokens_equal,
            self.tokens_compared + other.tokens_compared,
        )


def record(result: ParityResult) -> None:
    """Appends a result to the file that the environment names; does nothing if it names none."""
    path = os.environ.get(VARIABLE)
    if path:
        line = (json.dumps(asdict(result)) + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)  # one call: lines of several processes do not mix
        finally:
            os.close(descriptor)


def read_results(path: Path) -> dict[tuple[str, Layout], ParityResult]:
    """All results of a file, those of the same family and layout merged.

    Raises:
        ValueError: a line is not a result; names file and line.
    """
    lines = enumerate(path.read_text().splitlines(), 1)
    return _merge(_parse(path, number, line) for number, line in lines if line.strip())


def _parse(path: Path, number: int, line: str) -> ParityResult:
    try:
        result = ParityResult(**json.loads(line))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{path}, line {number}: not a parity result: {error}") from error
    if not math.isfinite(result.max_logit_difference):
        raise ValueError(f"{path}, line {number}: max_logit_difference is not finite")
    return result


def _merge(results: Iterable[ParityResult]) -> dict[tuple[str, Layout], ParityResult]:
    merged: dict[tuple[str, Layout], ParityResult] = {}
    for result in results:
        key = result.model_type, result.layout
        merged[key] = merged[key].merged(result) if key in merged else result
    return merged
