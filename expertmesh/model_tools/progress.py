"""How long-running tools report what they do."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Shows stages one after the other. Calls come from one thread."""

    def stage(self, name: str, total: int) -> None:
        """Begins a stage of `total` units (bytes); 0 if the size is not known."""

    def advance(self, count: int) -> None:
        """Adds units to the current stage."""

    def done(self) -> None:
        """Ends the last stage."""


class NoProgress:
    """Shows nothing."""

    def stage(self, name: str, total: int) -> None:
        """Ignores the stage."""

    def advance(self, count: int) -> None:
        """Ignores the units."""

    def done(self) -> None:
        """Ignores the end."""
