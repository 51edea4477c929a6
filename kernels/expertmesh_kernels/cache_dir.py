"""Where compiled kernels are kept between runs.

Numba notices a change of the file that a cached kernel is in, but not of the files it uses. So the
cache lies in a subfolder named after a digest of all kernel sources: an upgrade can't run stale
machine code.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_VARIABLE = "NUMBA_CACHE_DIR"
_PREFIX = "kernels-"


def set_numba_cache_dir() -> None:
    """Point NUMBA_CACHE_DIR to a subfolder for these sources; children inherit it unchanged."""
    wanted = Path(os.environ.get(_VARIABLE) or Path.home() / ".cache" / "expertmesh" / "numba")
    base = wanted.parent if wanted.name.startswith(_PREFIX) else wanted
    folder = base / (_PREFIX + _source_digest())
    if not _is_writable(folder):
        # Private, hence not reused: Numba unpickles what it finds in its cache.
        folder = Path(tempfile.mkdtemp(prefix="expertmesh-numba-"))
    os.environ[_VARIABLE] = str(folder)


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


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
