"""The cores of this machine: which may be used, and how the processes of a mesh share them.

Attention workers and expert workers take turns, so all cores are given to both kinds. Within a kind
no core is given twice, unless there are more processes than cores: a team of threads of which one
is descheduled holds up all the others. The gateway is free to run anywhere.

A process runs `settle` before it imports its kernels, which read `EXPERTMESH_THREADS`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from expertmesh.cgroups import groups_around, read_text
from expertmesh.errors import SettingsError

THREADS = "EXPERTMESH_THREADS"
"""Name of the environment variable with the number of threads of the kernels' team."""
MAX_THREADS = 1024

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True)
class CoreShare:
    """What one process may use. As text: `2 threads on cores 0-1`."""

    num_threads: int
    """Threads of its kernels."""
    cores: str = ""
    """The cores that it stays on, such as 0-3,8; empty: the system decides."""

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return threads + (f" on cores {self.cores}" if self.cores else "")


@dataclass(frozen=True)
class UsableCores:
    """What all our processes together may use."""

    ids: tuple[int, ...]
    """Cores that a thread may run on, in order."""
    limit: int
    """How many of them may be busy at a time: fewer than `ids` under a cgroup's quota."""

    def __post_init__(self) -> None:
        """Checks what the system said."""
        assert self.ids, "there is a core, or this would not run"
        assert 1 <= self.limit <= len(self.ids)

    @property
    def ours(self) -> bool:
        """No quota: the cores are for us. Else others run on them too, and the system must be free
        to move our threads out of their way."""
        return self.limit == len(self.ids)


def usable_cores(root: Path = Path("/")) -> UsableCores:
    """The cores that this process, and so its children, may run on, and how many at a time.

    Args:
        root: Where `proc` and `sys` are.
    """
    if not hasattr(os, "sched_getaffinity"):
        count = os.cpu_count() or 1
        return UsableCores(tuple(range(count)), count)
    ids = tuple(sorted(os.sched_getaffinity(0)))
    return UsableCores(ids, max(1, math.floor(min(len(ids), cgroup_quota(root)))))


def share_cores(
    usable: UsableCores, num_processes: int, *, max_threads: int | None = None, pin: bool = True
) -> tuple[CoreShare, ...]:
    """A share for each process of one kind.

    Cores next to each other, as they often share a cache. With more processes than cores each gets
    one, in turn. A process that gets all cores is not pinned.

    Args:
        usable: What is there.
        num_processes: Of this kind.
        max_threads: Most threads of a process.
        pin: Whether processes stay on cores of their own.
    """
    num_cores = usable.limit
    shares = []
    for index in range(num_processes):
        low = index * num_cores // num_processes
        high = (index + 1) * num_cores // num_processes
        if num_processes > num_cores:
            low, high = index % num_cores, index % num_cores + 1
        pinned = pin and usable.ours and high - low < num_cores
        own = usable.ids[low:high] if pinned else ()
        num_threads = min(high - low, max_threads or MAX_THREADS)
        shares.append(CoreShare(num_threads, format_cores(own)))
    return tuple(shares)


def settle(threads: int | None, cores: str) -> CoreShare:
    """Keeps this process on its cores, and tells its kernels how many threads they have.

    Call in the main thread before others are started: only later ones inherit the cores.

    Args:
        threads: Of the kernels; None: `EXPERTMESH_THREADS`, else one a core.
        cores: Such as 0-3,8; empty: wherever the system likes.

    Raises:
        SettingsError: More threads than cores, cores that this process may not use, or a value that
            cannot be read.
    """
    usable = usable_cores()
    own = parse_cores(cores) or usable.ids
    if foreign := set(own) - set(usable.ids):
        raise SettingsError(
            f"cores has {format_cores(foreign)}, but this process may run on "
            f"{format_cores(usable.ids)} only"
        )
    wanted = threads_of_environment() if threads is None else threads
    if wanted is not None and wanted > len(own):
        name = THREADS if threads is None else "threads"
        raise SettingsError(
            f"{name} is {wanted}, but this process may use {len(own)} core{'s'[: len(own) - 1]}",
            fix=f"use {len(own)} or fewer",
        )
    if cores:
        os.sched_setaffinity(0, own)
        # On cores that it shares, a process that is sent work must not interrupt the sender, which
        # has work for others too.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    share = CoreShare(wanted or min(len(own), usable.limit), cores)
    os.environ[THREADS] = str(share.num_threads)
    return share


def threads_of_environment() -> int | None:
    """`EXPERTMESH_THREADS`; None if it is not set. Raises SettingsError if it is no such number."""
    text = os.environ.get(THREADS, "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_THREADS:
        return int(text)
    raise SettingsError(
        f"{THREADS} is {text[:40]!r}, expected a whole number from 1 to {MAX_THREADS}"
    )


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores of a list such as 0-3,8, in order. Raises SettingsError."""
    ids: set[int] = set()
    for part in text.split(",") if text else ():
        found = _RANGE.fullmatch(part.strip())
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if low > high:
            raise SettingsError(f"cores has {part[:40]!r}, expected such as 0-3,8")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def format_cores(ids: Iterable[int]) -> str:
    """Inverse of `parse_cores`, with ranges."""
    runs: list[list[int]] = []
    for core in sorted(ids):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def cgroup_quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that this process's cgroup has, infinite without a limit.

    The least of its own limit and those of the groups around it counts. Both versions of cgroups;
    what cannot be read limits nothing.
    """
    groups = groups_around("cpu", root)
    return min((_quota_of(folder, version) for folder, version in groups), default=math.inf)


def _quota_of(folder: Path, version: int) -> float:
    if version == 2:
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
    else:
        quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # `max`, or no such file
        return math.inf
