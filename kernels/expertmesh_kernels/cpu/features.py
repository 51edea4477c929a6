"""What the CPU at hand can do beyond what every CPU can."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

import llvmlite.binding as llvm

_VARIABLE = "EXPERTMESH_AMX"
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA = 18


@cache
def has_amx() -> bool:
    """True if this process may use AMX tiles of bfloat16 (Sapphire Rapids and later).

    Linux grants them to a process that asks, for good. EXPERTMESH_AMX=0 does without, for instance
    so that expert workers of several kinds of machines have the same numerics.
    """
    if sys.platform != "linux" or os.environ.get(_VARIABLE) == "0":
        return False
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
