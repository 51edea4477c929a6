"""Lets another process compile the kernels that are not on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from expertmesh.compile_process import CompileProcess
from expertmesh_kernels.cpu.kept import KEPT, from_nowhere

logger = logging.getLogger(__name__)


def compile_elsewhere(
    module: str, arguments: Sequence[str], is_stopping: Callable[[], bool]
) -> None:
    """From now on `python -m module arguments` compiles what this process finds missing.

    Args:
        module: Runs all kernels of this kind of process once, and ends.
        arguments: For the module.
        is_stopping: True once this process was told to stop.
    """
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    KEPT.fetch = CompileProcess(module, arguments, folder, is_stopping).fetch


def end_of_start() -> None:
    """Tells how this process came by its kernels; one that is missing later is compiled here.

    Another process would take longer than that, and know only what a start needs.
    """
    KEPT.fetch = from_nowhere
    logger.debug("kernels: %d from disk, %d compiled here", KEPT.num_loaded, KEPT.num_compiled)
