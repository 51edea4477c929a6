"""`python -m tests.support.kernels_used KIND MODEL [DTYPE]`: the kernels a start asks the disk for.

KIND is attention, colocated or expert, and begins with small- for the small model that stands in
for MODEL. Prints how many were compiled, and a line for each kernel: its name and types.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from numba.core.caching import FunctionCache

from attention_worker import compile as attention_compile
from expert_worker import compile as expert_compile
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.settings import ExpertWorkerSettings
from expertmesh.stand_in import StandIn
from tests.support.processes import ROOT, environment

_TIMEOUT_S = 250.0


def kernels_used(kind: str, model: Path, dtype: str = "auto") -> set[str]:
    """Kernels that such a start finds on the disk, in a process of its own."""
    argv = [sys.executable, "-m", "tests.support.kernels_used", kind, str(model), dtype]
    for _ in range(2):  # what is compiled at first asks for what it contains, too
        done = subprocess.run(
            argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        num_compiled, *kernels = done.stdout.splitlines()
        if num_compiled == "0":
            return set(kernels)
    raise AssertionError(f"a second start compiles {num_compiled} kernels")


def _start(kind: str, model: Path, dtype: str) -> None:
    checkpoint = Checkpoint.open(model)
    if kind.startswith("small-"):
        checkpoint = StandIn(checkpoint)
    if kind.endswith("expert"):
        expert = ExpertWorkerSettings.from_dict({"dtype": dtype})
        expert_compile.compile_kernels(expert, checkpoint)
        return
    colocated = kind.endswith("colocated")
    attention = AttentionWorkerSettings.from_dict({"dtype": dtype, "colocated": colocated})
    attention_compile.compile_kernels(attention, checkpoint)


def main(kind: str, model: Path, dtype: str) -> None:
    """Starts, and prints."""
    kernels: set[str] = set()
    load = FunctionCache.load_overload

    def load_and_note(self: FunctionCache, signature: object, target: object) -> object:
        kernels.add(f"{self._py_func.__module__}.{self._py_func.__qualname__}{signature}")
        return load(self, signature, target)

    FunctionCache.load_overload = load_and_note
    _start(kind, model, dtype)
    from expertmesh_kernels.cpu.kept import KEPT

    sys.stdout.write("\n".join([str(KEPT.num_compiled), *sorted(kernels)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
