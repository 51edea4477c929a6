"""A day of the autoscaler as a figure and as a table, for docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.scaling_day.run import POLICY, SETTLED_S, DayResult, Step

FIGURE = Path(__file__).parents[2] / "docs" / "scaling_day.svg"
_WIDTH, _HEIGHT = 960, 320
_LEFT, _TOP, _BELOW = 40, 16, 28
_MOST = 10
_HOURS = 24


def table(day: DayResult) -> str:
    """The results, in Markdown."""
    steps = day.steps
    most = max(step.desired for step in steps)
    rows = (
        ("changes", f"{len(day.writes)}"),
        ("reversals of direction", f"{day.reversals}"),
        ("reversals within 10 minutes", f"{day.flaps}"),
        ("expert workers, fewest and most", f"{min(step.desired for step in steps)}, {most}"),
        (
            "fewest copies of any expert",
            f"{min(step.fewest_copies for step in steps if step.at_s > SETTLED_S)}",
        ),
        ("hours of expert workers", f"{day.worker_hours:.0f}"),
        ("the same with the most all day", f"{24 * most}"),
        ("time in which work waits for devices", f"{day.share_waiting(POLICY.wait_high_s):.1%}"),
        ("longest such wait", f"{max(step.wait_s for step in steps):.0f} s"),
    )
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)))


def draw(day: DayResult) -> str:
    """The figure, as SVG."""
    minutes = day.steps[:: len(day.steps) // (_HOURS * 60)]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            *_grid(),
            _line(_steps(minutes, lambda step: step.desired), "#1f5fbf", 2.0),
            _line(_steps(minutes, lambda step: step.serving), "#2a9d55", 1.2),
            _line([(s.at_s, s.work) for s in minutes], "#d2691e", 1.0),
            *_legend(),
            "</svg>\n",
        )
    )


def _grid() -> Iterable[str]:
    for number in range(0, _MOST + 1, 2):
        y = _y(number)
        yield f'<path d="M{_LEFT} {y}H{_WIDTH}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number}</text>'
    for hour in range(0, _HOURS + 1, 4):
        x, anchor = _x(hour * 3600), "end" if hour == _HOURS else "middle"
        yield f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{hour} h</text>'


def _legend() -> Iterable[str]:
    entries = (
        ("#d2691e", "work, in devices kept busy"),
        ("#1f5fbf", "expert workers asked for"),
        ("#2a9d55", "expert workers that serve"),
    )
    for n, (colour, text) in enumerate(entries):
        y = _TOP + 12 + 18 * n
        yield f'<path d="M{_LEFT + 12} {y - 4}h24" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{_LEFT + 44}" y="{y}">{text}</text>'


def _steps(
    minutes: Sequence[Step], value: Callable[[Step], float]
) -> Sequence[tuple[float, float]]:
    """Corners of a line of steps."""
    corners = [(minutes[0].at_s, value(minutes[0]))]
    for step in minutes[1:]:
        if value(step) != corners[-1][1]:
            corners += [(step.at_s, corners[-1][1]), (step.at_s, value(step))]
    return [*corners, (minutes[-1].at_s, corners[-1][1])]


def _line(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{_x(at_s)},{_y(value)}" for at_s, value in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _x(at_s: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * at_s / (_HOURS * 3600), 1)


def _y(value: float) -> float:
    return round(_HEIGHT - _BELOW - (_HEIGHT - _BELOW - _TOP) * value / _MOST, 1)
