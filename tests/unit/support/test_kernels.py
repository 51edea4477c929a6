"""Kernels that one process compiles are found by those that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.kernels import kernel_cache
from tests.support.processes import environment

_WHERE = "import os, expertmesh_kernels; print(os.environ['NUMBA_CACHE_DIR'])"


def test_told_the_cache_a_process_has_the_folder_of_this_one(tmp_path: Path) -> None:
    """Through a link of another name, too, as in the pods of the pocket cluster."""
    link = tmp_path / "numba"
    link.symlink_to(kernel_cache())
    said = subprocess.run(
        [sys.executable, "-c", _WHERE],
        env=environment({"NUMBA_CACHE_DIR": str(link)}),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert Path(said.strip()).resolve() == Path(os.environ["NUMBA_CACHE_DIR"]).resolve()
