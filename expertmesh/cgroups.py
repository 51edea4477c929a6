"""The control groups around this process, of both versions; what cannot be read limits nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups_around(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of all groups around this process, outermost first, each with its version, 1 or 2.

    Args:
        controller: Such as cpu or memory.
        root: Where `proc` and `sys` are.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(len(parts) + 1):
            yield base.joinpath(*parts[:depth]), 1 if controllers else 2


def read_text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
