"""The table that a run of the chaos suite prints: what failed, and what clients saw of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_HEADINGS = (
    "fault",
    "times",
    "requests",
    "failed",
    "changed",
    "stall median / worst",
    "without a fault",
    "recovery",
    "notes",
)


@dataclass
class Row:
    """One fault and its consequences."""

    fault: str
    times: int = 0
    """How often it happened."""
    requests: int = 0
    refused: int = 0
    """Answered 503 and not counted in `requests`, where new ones may be."""
    failed: int = 0
    changed: int = 0
    stalls_s: list[float] = field(default_factory=list)
    """One per fault."""
    calm_s: list[float] = field(default_factory=list)
    """The same, at moments without a fault: how much of a stall is the machine's."""
    recoveries_s: list[float] = field(default_factory=list)
    """From each fault until all serve again."""
    note: str = ""

    @property
    def stall_median_s(self) -> float:
        """Of all stalls."""
        return median(self.stalls_s)

    @property
    def stall_worst_s(self) -> float:
        """Of all stalls."""
        return max(self.stalls_s)

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of the headings."""
        return (
            self.fault,
            str(self.times),
            str(self.requests),
            str(self.failed),
            str(self.changed),
            _milliseconds(self.stalls_s),
            _milliseconds(self.calm_s),
            f"{max(self.recoveries_s):.1f} s" if self.recoveries_s else "",
            ", ".join(
                filter(None, (f"{self.refused} answered 503" * bool(self.refused), self.note))
            ),
        )


def _milliseconds(values_s: Sequence[float]) -> str:
    if not values_s:
        return ""
    return f"{median(values_s) * 1e3:.0f} / {max(values_s) * 1e3:.0f} ms"


def as_markdown(rows: Sequence[Row]) -> str:
    """All rows below their headings, in columns that are aligned."""
    lines = [_HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(cells, widths) for cells in (lines[0], rule, *lines[1:]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"
