"""Writes the reference pages of docs/ anew, and the tables of docs/http_api.md: `make docs`."""

from __future__ import annotations

from tests.support import parameter_tables
from tests.support.reference.pages import DOCS, PAGES


def main() -> None:
    """All of them."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
    parameter_tables.main()


if __name__ == "__main__":
    main()
