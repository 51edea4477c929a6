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
from functools import cache
from pathlib import Path

from expertmesh.settings import data_home

logger = logging.getLogger(__name__)

_PREFIX = "kernels-"
_PRIVATE_PREFIX = "expertmesh-kernels-"


def set_numba_cache_dir() -> None:
    """Points NUMBA_CACHE_DIR to a subfolder for these sources; children inherit it unchanged.

    Before Numba is imported, which reads it once.
    """
    wanted = Path(os.environ.get("NUMBA_CACHE_DIR") or data_home() / "numba")
    if wanted.name.startswith(f"{_PRIVATE_PREFIX}{_source_digest()}-"):
        return  # the parent's, for want of a folder that can be written
    base = wanted.parent if wanted.name.startswith(_PREFIX) else wanted
    folder = _writable(base / (_PREFIX + _source_digest()))
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def set_triton_cache_dir() -> None:
    """Points TRITON_CACHE_DIR to a folder that can be written; Triton tells versions apart."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or data_home() / "triton")
    os.environ["TRITON_CACHE_DIR"] = str(_writable(folder))


def _writable(folder: Path) -> Path:
    """The folder, or a temporary one with what is in it.

    That one is not kept: Numba unpickles what it finds in its cache, so it must be ours alone.
    """
    problem = _why_not_writable(folder)
    if not problem:
        return folder
    try:
        private = Path(tempfile.mkdtemp(prefix=f"{_PRIVATE_PREFIX}{_source_digest()}-"))
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


@cache
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
