"""A cgroup whose memory runs out, so that the kernel ends a process in it. Needs root on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "emmemory"
_PAGE = 4096
_SLACK_BYTES = 1 << 20
_TIMEOUT_S = 20.0
_HOG = f"""
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
taken = bytearray(256 << 20)
for page in range(0, len(taken), {_PAGE}):
    taken[page] = 1
"""
"""Joins the group and takes memory; the kernel ends members of the group first."""
_FIRST = "900"  # to be ended; anybody may raise this number, and few may lower it


class MemoryGroupError(AssertionError):
    """There is no memory cgroup here."""


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup, of the first or the second version."""

    folder: Path
    limit_file: str
    usage_file: str

    def add(self, pid: int) -> None:
        """Moves a process here. What it takes from now on counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST)

    @contextmanager
    def limited_to(self, limit_bytes: int) -> Iterator[None]:
        """No more memory than that."""
        limit = self.folder / self.limit_file
        before = limit.read_text()
        limit.write_text(str(limit_bytes))
        try:
            yield
        finally:
            limit.write_text("-1" if before.strip().isdigit() else before)

    def run_out(self) -> None:
        """A neighbour takes all that is left and more: the kernel ends the largest process here."""
        usage = int((self.folder / self.usage_file).read_text())
        with self.limited_to(usage + _SLACK_BYTES):
            procs = str(self.folder / "cgroup.procs")
            subprocess.run(
                [sys.executable, "-S", "-c", _HOG, procs], timeout=_TIMEOUT_S, check=False
            )


def why_not() -> str:
    """Why there can be no such group here; empty if there can."""
    if os.geteuid() != 0:
        return "memory cgroups need root"
    try:
        with memory_group() as group, group.limited_to(1 << 30):
            return ""
    except (OSError, MemoryGroupError) as error:
        return f"no memory cgroups here: {error}"


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group without a limit, gone at the end, with those that killed runs left behind.

    Raises:
        MemoryGroupError: The system has no memory controller for us.
    """
    parent, limit_file, usage_file = _controller()
    for left in parent.glob(f"{_PREFIX}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(_PREFIX))):
            _remove(left)
    folder = parent / f"{_PREFIX}{os.getpid()}"
    folder.mkdir()
    try:
        yield MemoryGroup(folder, limit_file, usage_file)
    finally:
        _remove(folder)


def _controller() -> tuple[Path, str, str]:
    first = _ROOT / "memory"
    if (first / "cgroup.procs").exists():
        return first, "memory.limit_in_bytes", "memory.usage_in_bytes"
    handed_on = _ROOT / "cgroup.subtree_control"
    if not handed_on.exists() or "memory" not in handed_on.read_text().split():
        raise MemoryGroupError(f"{handed_on} does not hand on the memory controller")
    return _ROOT, "memory.max", "memory.current"


def _remove(folder: Path) -> None:
    """Whoever is still there goes to the parent."""
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended
            (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()
