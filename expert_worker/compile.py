"""`python -m expert_worker.compile MODEL ...`: compiles what such a worker will need.

Loads an expert of zeros into each layer of a small model, runs every kernel once, and ends. Takes
the arguments of `python -m expert_worker`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from expert_worker.__main__ import parse_settings
from expertmesh.checkpoint import Checkpoint
from expertmesh.cores import settle
from expertmesh.errors import StartupError
from expertmesh.logs import configure_logging
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.processes import announce_failure, watch_lifeline
from expertmesh.settings import ExpertWorkerSettings, data_home
from expertmesh.stand_in import StandIn
from expertmesh.stop_request import StopRequest

_HOST = "127.0.0.1"


def main(argv: list[str]) -> int:
    """Compiles; returns the exit code."""
    watch_lifeline(lambda: os._exit(0))
    try:
        settings, _ = parse_settings(argv)
        _compile(settings)
    except StartupError as error:
        announce_failure(error)
        return error.exit_code
    return 0


def _compile(settings: ExpertWorkerSettings) -> None:
    configure_logging(replace(settings.log, log_level="warning"), "compiler")
    settle(settings.threads, settings.cores)
    from expert_worker.worker import ExpertWorker  # torch

    original = Checkpoint.open(resolve_model(settings.model, data_home(), NoProgress()))
    worker = ExpertWorker(_alone(settings), StandIn(original))
    worker.load(StopRequest())
    worker.stop()


def _alone(settings: ExpertWorkerSettings) -> ExpertWorkerSettings:
    """With one expert, and where nobody finds it."""
    direct_port = min(settings.direct_port, 0)
    return replace(
        settings, host=_HOST, port=0, direct_port=direct_port, experts="0", drain_grace_s=0.0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
