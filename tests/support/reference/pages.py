"""The pages of docs/ that are made from the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.reference.configuration import configuration_page
from tests.support.reference.errors import errors_page
from tests.support.reference.metrics import metrics_page

DOCS = Path(__file__).parents[3] / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
}
"""Name of a file to what makes its content."""
