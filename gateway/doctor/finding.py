"""What a check has found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Health(StrEnum):
    """How bad it is."""

    FINE = "fine"
    WARNING = "warning"
    """It works, perhaps not well, or not yet."""
    BROKEN = "broken"
    """It keeps the mesh from working."""


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    subject: str
    """What was looked at, e.g. `port`."""
    health: Health
    message: str
    """What is so, with values."""
    fix: str = ""
    """What to do about it; empty if it is fine."""

    def to_json(self) -> dict[str, str]:
        """Fields by name."""
        return {name: str(value) for name, value in asdict(self).items()}


def fine(subject: str, message: str) -> Finding:
    """Nothing is to be done."""
    return Finding(subject, Health.FINE, message)


def warning(subject: str, message: str, fix: str) -> Finding:
    """Something should be done."""
    return Finding(subject, Health.WARNING, message, fix)


def broken(subject: str, message: str, fix: str) -> Finding:
    """Something must be done."""
    return Finding(subject, Health.BROKEN, message, fix)
