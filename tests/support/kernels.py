"""Compiles the CPU kernels once, before several processes start and would all do it at once."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from expertmesh.model_config import DtypeName
from expertmesh_kernels.self_test import numerics_fingerprint
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import MIXTRAL_FOUR, save_tiny

_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


@functools.cache
def compile_kernels() -> None:
    """Fills the kernel cache that child processes read; half a minute once, then a second."""
    for dtype in _DTYPES:
        numerics_fingerprint(dtype)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = save_tiny(Path(folder), MIXTRAL_FOUR)
        for dtype in _DTYPES:
            driver = RunnerDriver(make_runner(model_dir, dtype=dtype), chunk=16)
            driver.submit([5] * 20, 2)
            driver.run()


def kernel_cache() -> Path:
    """What a process must be told as NUMBA_CACHE_DIR to find the kernels that were compiled here.

    Importing `expertmesh_kernels` has pointed this process to a subfolder of it, as it does there.
    """
    return Path(os.environ["NUMBA_CACHE_DIR"]).parent
