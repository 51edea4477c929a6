"""`python -m tests.support.precompile PART`: compiles what nearly all meshes of tests need.

`make test` runs it beside the static checks, which leave cores idle. Otherwise the processes that
run tests side by side would all compile the same at the same time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from attention_worker import compile as attention_worker
from expert_worker import compile as expert_worker
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.settings import ExpertWorkerSettings
from expertmesh.stand_in import StandIn
from tests.conftest import Models

_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


def main(part: str) -> None:
    """Compiles for one of the two kinds of workers, in the folder that tests look into."""
    # Only now: torch and Numba read the environment, which `tests.conftest` has set.
    from tests.support.tiny_checkpoints import MIXTRAL

    with tempfile.TemporaryDirectory() as folder:
        original = Checkpoint.open(Models(Path(folder)).tiny(MIXTRAL))
        for dtype in _DTYPES:
            _PARTS[part](dtype, StandIn(original))


def _for_expert_worker(dtype: DtypeName, checkpoint: Checkpoint) -> None:
    expert_worker.compile_kernels(ExpertWorkerSettings(dtype=dtype), checkpoint)


def _for_attention_worker(dtype: DtypeName, checkpoint: Checkpoint) -> None:
    for colocated in (False, True):
        settings = AttentionWorkerSettings(dtype=dtype, colocated=colocated)
        attention_worker.compile_kernels(settings, checkpoint)


_PARTS: dict[str, Callable[[DtypeName, Checkpoint], None]] = {
    "expert-worker": _for_expert_worker,
    "attention-worker": _for_attention_worker,
}

if __name__ == "__main__":
    main(sys.argv[1])
