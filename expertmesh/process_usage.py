"""What a process of this machine takes: processor time and memory, as far as Linux tells."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from expertmesh.cgroups import read_text

_USER_TICKS, _SYSTEM_TICKS, _RSS_PAGES = 11, 12, 21
"""Fields of /proc/PID/stat after the name of the program, which may contain blanks."""


@dataclass(frozen=True)
class ProcessUsage:
    """Of one process; zeros if the system does not tell."""

    cpu_s: float = 0.0
    """Processor time of all its threads."""
    rss_bytes: int = 0
    """Memory that is in RAM, with what it shares with others."""


def usage_of(pid: int | None = None, root: Path = Path("/proc")) -> ProcessUsage:
    """What a process takes.

    Args:
        pid: Which one; this one by default.
        root: Where the system tells.
    """
    text = read_text(root / ("self" if pid is None else str(pid)) / "stat")
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _RSS_PAGES:
        return ProcessUsage()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessUsage(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        rss_bytes=int(fields[_RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE"),
    )
