"""Tables and frames of the reference pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make docs`: change the code that it is made from. -->"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(title: str, *parts: str) -> str:
    """A whole document."""
    return "\n\n".join((f"# {title}", NOTE, *parts)) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
