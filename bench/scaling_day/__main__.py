"""`python -m bench.scaling_day`: runs the committed day, writes its figure, prints its table."""

from __future__ import annotations

from bench.scaling_day.day import read_day
from bench.scaling_day.figure import FIGURE, draw, table
from bench.scaling_day.run import run_day


def main() -> None:
    """Takes a few seconds."""
    result = run_day(read_day())
    FIGURE.write_text(draw(result), encoding="utf-8")
    for at_s, before, after in result.writes:
        print(f"{at_s / 3600:5.2f} h: {before} -> {after}")
    print(table(result))


if __name__ == "__main__":
    main()
