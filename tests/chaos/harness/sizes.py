"""Short runs belong to `make test` and look at no clock; full ones to `make chaos`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Size:
    """How often something is done, and whether limits in seconds are checked."""

    times: int
    measured: bool


def sizes(short: int, full: int) -> pytest.MarkDecorator:
    """Runs a test as `size` so often in `make test`, and so often in `make chaos`."""
    return pytest.mark.parametrize(
        "size",
        [
            pytest.param(Size(short, measured=False), id="short"),
            pytest.param(Size(full, measured=True), id="full", marks=pytest.mark.chaos),
        ],
    )
