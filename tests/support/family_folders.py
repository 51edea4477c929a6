"""Tiny checkpoints of all families, and what transformers says about them, each made once."""

from __future__ import annotations

from pathlib import Path

from tests.support.oracle import Oracle
from tests.support.tiny_families import CASES, save_family, served_folder


class FamilyFolders:
    """Checkpoints by the names of `CASES`.

    Args:
        folder: Where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oracles: dict[str, Oracle] = {}

    def served(self, name: str) -> Path:
        """The checkpoint as its family calls it."""
        folder = self._folder / f"{name}-served"
        if folder.exists():
            return folder
        return served_folder(folder, self._made(name), CASES[name])

    def oracle(self, name: str) -> Oracle:
        """The reference."""
        if name not in self._oracles:
            self._oracles[name] = Oracle(self._made(name))
        return self._oracles[name]

    def _made(self, name: str) -> Path:
        folder = self._folder / name
        return folder if folder.exists() else save_family(folder, CASES[name])
