"""Where compiled kernels are kept between runs.

Numba notices a change of the file that a cached kernel is in, but not of the files it uses. So the
cache lies in a subfolder named after a digest of all kernel sources: an upgrade can't run stale
machine code. Where nothing can be written (a container's image), kernels that are there are used,
and those that are not are compiled at each start; the log says so in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from expertmesh.settings import data_home

logger = logging.getLogger(__name__)

_NUMBA = "NUMBA_CACHE_DIR"
_TRITON = "TRITON_CACHE_DIR"
_PREFIX = "kernels-"


def set_kernel_cache_dirs() -> None:
    """Points NUMBA_CACHE_DIR to a subfolder for these sources, and TRITON_CACHE_DIR beside it.

    Children inherit both unchanged. Before Numba and Triton are imported, which read them once.
    """
    wanted = Path(os.environ.get(_NUMBA) or data_home() / "numba")
    base = wanted.parent if wanted.name.startswith(_PREFIX) else wanted
    folder = base / (_PREFIX + _source_digest())
    problem = _why_not_writable(folder)
    if problem:
        folder = _private_copy(folder, problem)
    os.environ[_NUMBA] = str(folder)
    os.environ.setdefault(_TRITON, str(folder if problem else data_home() / "triton"))


def _private_copy(folder: Path, problem: str) -> Path:
    """A temporary folder with what is in this one, which cannot be written.

    Not kept: Numba unpickles what it finds in its cache, so it must be ours alone.
    """
    try:
        private = Path(tempfile.mkdtemp(prefix="expertmesh-numba-"))
    except OSError:
        logger.warning("compiled kernels cannot be kept in %s: %s", folder, problem)
        return folder
    with contextlib.suppress(OSError, shutil.Error):  # what cannot be read is compiled
        shutil.copytree(folder, private, dirs_exist_ok=True)
    found = any(private.iterdir())
    logger.warning(
        "compiled kernels cannot be kept in %s: %s; %s compiled at each start",
        folder,
        problem,
        "what is missing there is" if found else "all are",
    )
    return private


def set_triton_cache_dir() -> None:
    """Point TRITON_CACHE_DIR to a folder that can be written; Triton tells versions apart."""
    default = Path.home() / ".cache" / "expertmesh" / "triton"
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or default)
    if not _is_writable(folder):
        folder = Path(tempfile.mkdtemp(prefix="expertmesh-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _why_not_writable(folder: Path) -> str:
    """Why no file can be made there; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
