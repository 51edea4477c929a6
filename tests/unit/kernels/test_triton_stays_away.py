"""Processes without a GPU do not load Triton, which takes a second and 100 MB."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import pkgutil, sys
import numpy as np, torch
import attention_worker.worker, expert_worker.worker, expertmesh_kernels
from expertmesh_kernels.combine import combine
for module in pkgutil.iter_modules(expertmesh_kernels.__path__):
    __import__(f"expertmesh_kernels.{module.name}")
combine(torch.ones(2, 4), np.ones((1, 2), np.float32))
sys.exit("triton" in sys.modules)
"""


def test_ops_on_the_cpu_do_not_import_triton() -> None:
    """Neither when they are imported, nor when one runs."""
    assert subprocess.run([sys.executable, "-c", _PROGRAM], timeout=120).returncode == 0
