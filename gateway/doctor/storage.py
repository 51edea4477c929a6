"""The data folder: where demo models and compiled kernels are kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gateway.doctor.finding import Finding, broken, fine, warning

_LITTLE_ROOM = 2 * 2**30
"""Bytes: the demo model takes 0.8 GB while it is made, and kernels some 100 MB."""
_GIB = 2**30


def check_storage(home: Path) -> Iterator[Finding]:
    """Whether models and kernels can be kept.

    Args:
        home: Data folder, which need not be there yet.
    """
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    problem = _why_not_writable(existing)
    if problem:
        fix = "have EXPERTMESH_HOME name a folder that can be written, or make this one so"
        yield broken("data folder", f"{home} cannot be written: {problem}", fix)
        return
    left = shutil.disk_usage(existing).free
    message = f"{home}, {left / _GIB:.1f} GiB left"
    if left < _LITTLE_ROOM:
        yield warning("data folder", message, "make room, or move it with EXPERTMESH_HOME")
    else:
        yield fine("data folder", message)
    yield _kernels(Path(os.environ.get("NUMBA_CACHE_DIR") or home / "numba"))


def _why_not_writable(folder: Path) -> str:
    """Tries it, as rights alone do not tell of a file system that is read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _kernels(cache: Path) -> Finding:
    num_files = sum(1 for _ in cache.rglob("*.nbc")) if cache.is_dir() else 0
    if not num_files:
        message = f"no compiled kernels in {cache}"
        return warning("kernels", message, "nothing: the first start compiles them, for minutes")
    return fine("kernels", f"{num_files} files of compiled kernels in {cache}")
