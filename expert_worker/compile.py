"""`python -m expert_worker.compile MODEL ...`: compiles what such a worker will need.

Runs every kernel once with experts of zeros of a small model, and ends. Takes the arguments of
`python -m expert_worker`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from expert_worker.__main__ import parse_settings
from expertmesh.checkpoint import Checkpoint
from expertmesh.compile_process import run_compiler
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.settings import ExpertWorkerSettings, data_home
from expertmesh.stand_in import StandIn

_HOST = "127.0.0.1"


def main(argv: list[str]) -> int:
    """Compiles; returns the exit code."""
    return run_compiler(lambda: parse_settings(argv)[0], _compile)


def _compile(settings: ExpertWorkerSettings) -> None:
    original = Checkpoint.open(resolve_model(settings.model, data_home(), NoProgress()))
    compile_kernels(settings, StandIn(original))


def compile_kernels(settings: ExpertWorkerSettings, checkpoint: Checkpoint) -> None:
    """Runs every kernel once.

    Args:
        settings: Of the worker.
        checkpoint: What it serves, or what stands in for it.
    """
    from expert_worker.worker import ExpertWorker  # torch

    worker = ExpertWorker(_alone(settings), checkpoint)
    worker.warm_up()
    worker.start()
    worker.stop()


def _alone(settings: ExpertWorkerSettings) -> ExpertWorkerSettings:
    """Without experts, and where nobody finds it."""
    direct_port = min(settings.direct_port, 0)
    return replace(
        settings, host=_HOST, port=0, direct_port=direct_port, experts="none", expert_slots=None,
        drain_grace_s=0.0,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
