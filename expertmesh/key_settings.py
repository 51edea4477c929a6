"""Settings of where accepted keys are; the keys themselves are in none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from expertmesh.settings_base import Settings


@dataclass(frozen=True)
class KeyFiles(Settings):
    """Files with an accepted key a line, which are read anew when they change."""

    api: str = ""
    """Absolute path of that with keys of those who generate; empty: none."""
    admin: str = ""
    """The same of those who drain expert workers and move experts."""

    @classmethod
    def of(cls, api: Path | None, admin: Path | None) -> Self:
        """As flags name them."""
        return cls(*(str(path.expanduser().absolute()) if path else "" for path in (api, admin)))
